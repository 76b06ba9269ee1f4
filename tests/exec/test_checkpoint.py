"""What is in a checkpoint, what loading it changes, damage, refusals, which of them a folder keeps, and whose it is."""

import multiprocessing
from pathlib import Path
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from exec.pretended import refuses
from exec.saved import FILE, before_each_change, cut, flipped, names, saved, trained, untrained, weights
from hypothesis import given
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from synergy_exec.training import checkpoint_folder, integrity
from synergy_exec.training.checkpoint import Checkpoints, State, packed
from synergy_exec.training.checkpoint_folder import FencedError, Staging
from synergy_exec.training.integrity import Progress


def test_before_the_first_step_the_optimizer_stays_untouched(tmp_path):
    """torch's own way would count a step of Adam that never was."""
    job = trained(0)
    job.save(tmp_path, Progress())
    assert not job.optimizer.state
    found = untrained()
    assert found.load(tmp_path) == Progress()
    assert [found.step(number) for number in range(3)] == [job.step(number) for number in range(3)]


class Counting(Optimizer):
    """Keeps Python numbers, as optimizers of other libraries do: a count in its state, one in its group."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0, "decay": 1.0})

    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            group["decay"] /= 3
            for each in group["params"]:
                self.state[each]["count"] = self.state[each].get("count", 0) + 1


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (lambda state, weight: state.update(steps=1), "keeps state as 'steps'"),
        (lambda state, weight: state[weight].update({"mean.fast": torch.zeros(2)}), "keeps state as 'mean.fast'"),
        (
            lambda state, weight: state[weight].update(seen=torch.eye(2).to_sparse()),
            "seen.weight is a tensor of layout",
        ),
    ],
)
def test_state_of_an_optimizer_that_would_be_lost_is_refused(tmp_path, keep, says):
    part = nn.Linear(3, 2)
    optimizer = Counting(part.parameters())
    optimizer.step()
    keep(optimizer.state, part.weight)
    refuses(says, Checkpoints(tmp_path).save, State([part], [optimizer]), Progress(step=1))


def test_python_numbers_of_an_optimizer_go_on(tmp_path):
    (part, optimizer), (other, found) = (((net := nn.Linear(3, 2)), Counting(net.parameters())) for _ in range(2))
    for _ in range(5):
        optimizer.step()
    Checkpoints(tmp_path).save(State([part], [optimizer]), Progress(step=5))
    found.param_groups[0]["lr"] = 0.7
    Checkpoints(tmp_path).load(State([other], [found]))
    assert [each["count"] for each in found.state.values()] == [5, 5]
    (group,) = found.param_groups
    assert (group["steps"], group["decay"], group["lr"]) == (5, optimizer.param_groups[0]["decay"], 0.7)


@pytest.mark.parametrize(
    ("build", "optimizer", "named"),
    [
        (lambda: nn.Linear(3, 5), AdamW, "model.bias is \\(2,\\) in it and \\(5,\\) in the job"),
        (lambda: nn.Linear(3, 2, bias=False), AdamW, "model.bias is \\(2,\\) in it and missing in the job"),
        (lambda: nn.Linear(3, 2), SGD, "the optimizer of bias is AdamW in it and SGD in the job"),
    ],
)
def test_another_model_or_optimizer_is_refused_untouched(tmp_path, build, optimizer, named):
    part = nn.Linear(3, 2)
    its = AdamW(part.parameters())
    part(torch.ones(1, 3)).sum().backward()
    its.step()
    Checkpoints(tmp_path).save(State([part], [its]), Progress(step=1))
    other = build()
    before = other.weight.detach().clone()
    refuses(named, Checkpoints(tmp_path).load, State([other], [optimizer(other.parameters(), lr=0.1)]))
    assert torch.equal(other.weight, before)


# Damaged ones are named and passed over; nothing live changes


def swapped(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [cut, lambda path: path.write_bytes(b""), flipped, Path.unlink, swapped])
@pytest.mark.parametrize("file", ["progress.json", FILE])
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, file, harm):
    trained(2, folder=tmp_path)
    assert names(tmp_path / "step-00000002") == ["progress.json", FILE]
    harm(tmp_path / "step-00000002" / file)
    job = untrained()
    assert job.load(tmp_path) == Progress(step=1)
    assert torch.equal(weights(job), weights(trained(1)))
    assert "step-00000002 is damaged" in caplog.text
    assert file in caplog.text


def test_any_flipped_bit_of_progress_is_seen(tmp_path):
    progress = Progress(step=7, samples=56, work=6.5, grad_sqr=0.1, grad_var=0.3, noise_weight=5.0)
    tensor = integrity.Stored("float32", (4, 2), [integrity.TensorPiece("a", (2, 0), (2, 2))])
    integrity.write(tmp_path, integrity.Manifest(progress, {"a": integrity.Digest(3, 4)}, {"weight": tensor}))
    path = tmp_path / integrity.NAME
    good = path.read_bytes()
    assert integrity.read(tmp_path).progress == progress
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(integrity.DamagedError):
            integrity.read(tmp_path)


# Which of them a folder keeps, whenever the process that writes them dies


def test_none_is_no_error(tmp_path):
    assert untrained().load(tmp_path / "absent") is None
    (tmp_path / ".partial-step-00000001-aa").mkdir()
    assert untrained().load(tmp_path) is None


def test_a_checkpoint_that_cannot_be_read_asks_for_no_time(tmp_path, monkeypatch):
    trained(1, folder=tmp_path)
    assert checkpoint_folder.saving_s(tmp_path) > 0
    for error in (PermissionError, NotADirectoryError, FileNotFoundError):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "iterdir", Mock(side_effect=error))
            assert checkpoint_folder.saving_s(tmp_path) == 0


def test_the_newest_two_are_kept_and_stale_partial_ones_swept(tmp_path):
    stale = tmp_path / ".partial-step-00000009-00000000"
    stale.mkdir()
    (stale / FILE).write_text("half")
    trained(4, folder=tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    trained(5).save(tmp_path, Progress(step=5), keep=1)
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize(("steps", "next_step", "kept"), [((2, 3), 4, (2, 4)), ((2, 4), 3, (2, 3))])
def test_damaged_ones_do_not_count_as_kept_and_steps_done_again_replace_them(tmp_path, steps, next_step, kept):
    for step in steps:
        saved(tmp_path, step)
    cut(tmp_path / f"step-{steps[-1]:08d}" / FILE)
    saved(tmp_path, next_step)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


class DiedError(BaseException):
    pass


@pytest.mark.parametrize("new_step", [3, 2])
def test_death_between_any_two_changes_leaves_whole_checkpoints(tmp_path, monkeypatch, new_step):
    """new_step 3: a further one. 2: in place of one that is there already, and damaged."""
    wanted = {step: weights(trained(step)) for step in (1, 2, 3)}
    before = new_step - 1
    seen, died = [], True
    while died:
        moment = len(seen)
        folder = tmp_path / str(moment)
        for step in (1, 2):
            saved(folder, step)
        if new_step == 2:
            flipped(folder / "step-00000002" / FILE)
        job = trained(new_step)

        def die(number, moment=moment):
            if number >= moment:
                raise DiedError

        with monkeypatch.context() as patched:
            made = before_each_change(patched, die)
            try:
                job.save(folder, Progress(step=new_step))
                died = False
            except DiedError:
                pass
        found = untrained()
        step = found.load(folder).step
        assert step in {before, new_step}, made
        assert torch.equal(weights(found), wanted[step]), made
        seen.append(step)
        saved(folder, 3)
        assert len(names(folder)) == 2, made
        assert names(folder)[1] == "step-00000003", made
    assert len(seen) > 6
    assert (seen[0], seen[-1]) == (before, new_step)


# A newer run takes a job's folder over: an older one changes nothing more, wherever it had stopped


def contents(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.glob("step-*/*")}


@pytest.mark.parametrize("step", [3, 2])
def test_run_that_is_overtaken_before_any_change_changes_nothing_more(tmp_path, monkeypatch, step):
    """The older run saves step 3, or 2, which it replaces. The newer one goes on from what it finds, and saves 4."""
    found = []
    for moment in range(100):
        folder = tmp_path / str(moment)
        old, new = Staging(folder, 1).take_over(), Staging(folder, 2)
        for each in (1, 2):
            saved(folder, each, old)
        there = []

        def take_over(number, moment=moment, folder=folder, new=new, there=there):
            if number == moment:
                monkeypatch.undo()
                new.take_over()
                job = untrained()
                found.append(job.load(folder).step)
                assert torch.equal(weights(job), weights(trained(found[-1])))
                saved(folder, 4, new, seed=7)
                there.append(contents(folder))

        job = trained(step)
        made = before_each_change(monkeypatch, take_over)
        try:
            job.save(folder, Progress(step=step), staging=old)
            fenced = False
        except FencedError:
            fenced = True
        finally:
            monkeypatch.undo()
        if not there:
            break
        # Where all that was left was to flush, it ends well.
        assert fenced or moment > 6, made
        assert contents(folder) == there[0], made
        assert not (folder / ".run-00000001").exists()
    assert len(made) > 6
    assert (found[0], found[-1]) == (2, step)


def test_run_that_begins_late_is_refused_and_disturbs_nobody(tmp_path):
    new = Staging(tmp_path, 5).take_over()
    with pytest.raises(FencedError, match="run 4 is over"):
        Staging(tmp_path, 4).take_over()
    new.check()
    with pytest.raises(FencedError):
        Staging(tmp_path, 4).take_over()
    saved(tmp_path, 1, Staging(tmp_path, 6).take_over())
    with pytest.raises(FencedError):
        new.check()
    assert [each.name for each in checkpoint_folder.newest_first(tmp_path)] == ["step-00000001"]


def take(folder, run, barrier, outcomes):
    staging = Staging(folder, run)
    barrier.wait(60)
    try:
        staging.take_over()
        outcomes.put((run, True))
    except FencedError:
        outcomes.put((run, False))


def test_of_runs_that_begin_at_once_the_newest_has_the_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    for repeat in range(8):
        folder, barrier, outcomes = tmp_path / str(repeat), context.Barrier(4), context.Queue()
        processes = [context.Process(target=take, args=(folder, run, barrier, outcomes)) for run in range(4)]
        for each in processes:
            each.start()
        taken = dict(outcomes.get(timeout=60) for _ in processes)
        for each in processes:
            each.join()
        assert taken[3]
        assert names(folder) == [".run-00000003"]


MEGABYTES = st.lists(st.integers(0, 3_000), min_size=1, max_size=60)


@given(MEGABYTES)
def test_blocks_are_packed_apart_into_buffers_of_powers_of_two(megabytes):
    sizes = [1_000_001 * each for each in megabytes]
    buffers, places = packed(sizes)
    assert all(each & (each - 1) == 0 for each in buffers)
    ends = [0] * len(buffers)
    for size, (buffer, at) in sorted(zip(sizes, places, strict=True), key=lambda each: each[1]):
        assert ends[buffer] <= at
        assert at % 64 == 0, "torch views any type there"
        ends[buffer] = at + size
    assert all(end <= size for end, size in zip(ends, buffers, strict=True))


def test_the_state_of_a_large_model_takes_little_more_pinned_memory_than_it_has():
    """Of 7B parameters with AdamW in float32, which takes 1.3 times as much where each tensor is by itself."""
    layer = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    sizes = [4 * each for each in 3 * (32 * layer + 2 * [32000 * 4096] + [4096])]
    each_rounded = sum(1 << (size - 1).bit_length() for size in sizes)
    buffers, _ = packed(sizes)
    assert sum(buffers) < 1.05 * sum(sizes) < each_rounded


def test_tensors_that_lie_in_one_buffer_are_written_each(tmp_path):
    buffer = torch.arange(64, dtype=torch.float32)
    model = nn.Linear(4, 4)
    model.weight.data, model.bias.data = buffer[:16].view(4, 4), buffer[32:36]
    Checkpoints(tmp_path).save(State([model], [SGD(model.parameters(), lr=0.1)]), Progress())
    other = nn.Linear(4, 4)
    Checkpoints(tmp_path).load(State([other], [SGD(other.parameters(), lr=0.1)]))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
