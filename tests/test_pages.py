"""The runner of bench/ uses kept results again, replaces blocks alone, and names what is out of date."""

from __future__ import annotations

import json
from pathlib import Path

import pages
import pytest
from runner import blocks, carry_out, dependencies
from runner.experiment import Experiment, Simulation, experiments, measurement

from synergy_core.scheduling.policies import synergy as synergy_module

ROOT = Path(__file__).resolve().parents[1]
PAGE = """Text that stays, with <!-- begin lengths.longest -->0<!-- end --> in a line.

<!-- made lengths digest=none cpu_s=0 -->
Made by <!-- begin lengths.made -->nobody<!-- end -->

<!-- begin lengths.all -->

| old |

<!-- end -->

<!-- begin other.all -->kept<!-- end -->
"""


def length(word: str) -> dict[str, int]:
    """A measurement that fails for an empty word."""
    return {"length": len(word), "inverse": 1 // len(word)}


def lengths(*words: str, **fields) -> Experiment:
    tasks = [measurement(length, word=word) for word in words]

    def tables(results):
        found = [results[task]["length"] for task in tasks]
        return {"all": f"| {found} |", "longest": str(max(found))}

    return Experiment(lambda: tasks, tables, name="lengths", **fields)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A repository with one page, whose experiment measures the length of two words."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    for module in (blocks, pages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(carry_out, "KEPT", tmp_path / "kept")
    return tmp_path / "README.md"


def make(monkeypatch, experiment, *arguments):
    monkeypatch.setattr(pages, "experiments", lambda: {experiment.name: experiment})
    return pages.main([*arguments, "--workers", "1"])


def test_a_section_is_made_once_and_again_when_a_setting_changes(page, monkeypatch, capfd):
    assert make(monkeypatch, lengths("a", "word")) == 0
    text = page.read_text("utf-8")
    assert "with <!-- begin lengths.longest -->4<!-- end --> in a line" in text
    assert "\n\n| [1, 4] |\n\n" in text
    assert "old" not in text
    assert "kept" in text
    assert "`python bench/pages.py lengths`" in text
    assert make(monkeypatch, lengths("a", "word"), "--stale") == 0
    assert "0 of 1 sections are out of date" in capfd.readouterr().out
    assert make(monkeypatch, lengths("word", "longer")) == 0
    assert "| [4, 6] |" in page.read_text("utf-8")
    assert "1/1" in capfd.readouterr().err, "a result that is there was measured again"


def test_a_section_with_a_failed_task_stays_as_it_is(page, monkeypatch, capfd):
    assert make(monkeypatch, lengths("word", "")) == 1
    assert page.read_text("utf-8") == PAGE
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_marks_say_what_is_out_of_date_and_go_when_it_is_made(page, monkeypatch):
    make(monkeypatch, lengths("a"), "--mark")
    make(monkeypatch, lengths("a"), "--mark")
    assert page.read_text("utf-8").count(blocks.OUT_OF_DATE) == 1
    make(monkeypatch, lengths("a"))
    made = page.read_text("utf-8")
    assert blocks.OUT_OF_DATE not in made
    make(monkeypatch, lengths("a"), "--mark")
    assert page.read_text("utf-8") == made


def test_a_page_that_shows_an_unknown_experiment_is_an_error(page, monkeypatch):
    page.write_text(PAGE.replace("made lengths", "made lenghts"), encoding="utf-8")
    with pytest.raises(SystemExit, match="lenghts"):
        make(monkeypatch, lengths("a"), "--stale")


def test_a_constant_of_a_policy_makes_its_experiments_stale_and_no_others(monkeypatch):
    declared = [lengths("a", policies=names) for names in (("synergy",), ("sia", "synergy"), ("sia", "fifo"), ())]
    before = [dependencies.of_experiment(each) for each in declared]
    monkeypatch.setattr(synergy_module, "YOUNG_S", 301.0)
    dependencies.of_policy.cache_clear()
    after = [dependencies.of_experiment(each) for each in declared]
    monkeypatch.undo()
    dependencies.of_policy.cache_clear()
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True, True]


def test_recorded_decisions_and_values_of_files_count_and_comments_do_not(tmp_path, monkeypatch):
    recorded = json.loads((ROOT / "tests" / "digests.json").read_text("utf-8"))
    file = tmp_path / "constants.yaml"
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    experiment = lengths("a", policies=("fifo",), reads=("constants.yaml",))

    def found(text: str, cases: dict[str, list[str]]) -> str:
        file.write_text(text, encoding="utf-8")
        monkeypatch.setattr(dependencies, "_recorded", lambda: {**recorded, "cases": cases})
        dependencies.of_policy.cache_clear()
        dependencies.of_file.cache_clear()
        return dependencies.of_experiment(experiment)

    cases = recorded["cases"]
    same = [
        found("a: 1", cases),
        found("a: 1  # one", cases),
        found("a: 1", {name: cases[name] for name in ("fifo", "synergy")}),
    ]
    others = [found("a: 2", cases), found("a: 1", {name: cases[name] for name in cases if name != "fifo"})]
    dependencies.of_policy.cache_clear()
    dependencies.of_file.cache_clear()
    assert len({*same}) == 1
    assert len({*same, *others}) == 3


def test_a_simulation_gives_the_figures_of_its_summary():
    task = Simulation("fifo", ("+trace=philly", "trace.window=2h", "cluster.nodes=30"))
    found = task.execute()
    assert found["jobs"] > 0
    assert found["mean_jct_s"] > 0
    assert task.settings() != Simulation("fifo", task.overrides, seed=1).settings()


def test_every_page_shows_declared_experiments_and_every_experiment_is_shown():
    made = blocks.made()
    assert set(made) == set(experiments())
    for path in blocks.pages():
        shown = {name for name, _ in blocks.names(path.read_text("utf-8"))}
        assert shown == {name for name, each in made.items() if each.page == path}
    for experiment in experiments().values():
        tasks = experiment.tasks()
        assert tasks
        assert len({dependencies.of_task(task, experiment) for task in tasks}) == len({*tasks}), experiment.name


def test_every_notebook_says_what_it_depends_on():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        stored = json.loads(path.read_text("utf-8"))["metadata"]["synergy"]
        assert stored.get("policies") or stored.get("reads"), path
        assert all((ROOT / name).exists() or name == dependencies.PLANS for name in stored.get("reads", ()))
