"""Finds the best parallel plans of a model on given GPUs: time, memory, time by part, and why other plans are slower.

    python -m synergy_core plan model=gpt-175b gpu=a100-80gb gpus=1024 top=5
    python -m synergy_core plan model=mine.yaml gpu=a100,h100 gpus=8..1024 batch=1536 --picture plans.svg
    python -m synergy_core plan model=llama-3-8b gpu=h100 gpus=64 tokens=15T price=2.50 --emit megatron args.txt

model: a catalog name, a YAML file in the catalog's format, or a Hugging Face config.json (nothing is downloaded). gpu:
GPU or node types of the catalog, or your own data sheet, a YAML file in the format of
synergy_core/performance/catalog/gpus/ (then give gpus_per_node and network too, and link if it is nvlink). gpus:
counts, or ranges `8..1024`. batch: sequences or images per step; the default is GPT-3's rule of thumb, 2^19 tokens ×
(parameters ÷ 10^8)^¼, rounded up to a power of two, or 1,024 images. seq_len: tokens per sequence, by default the
model's. tokens: length of a whole training, such as 15T, to print its days, tokens/s and GPU-hours. price: price of a
GPU-hour, one for all or one per gpu, to print its cost. software: a training stack of the catalog. constants: a file
written by `calibrate --out`, used instead of the shipped constants. top: plans shown per count of GPUs. gpus_per_node,
network (bytes/s per GPU), link (nvswitch, nvlink, pcie): describe a node that differs from the usual one. gradients:
precision in which gradients are summed and sent, bf16 or fp32, if the software supports more than one. optimizer:
adamw, adamw_bf16, adamw8bit, paged_adamw8bit, adafactor, lion, lion8bit, muon, sgd, sgd_momentum. lora: rank of
adapters on all matrices of frozen weights; quantize: bits of these weights, 4 (QLoRA), 8 or 16. loss: compiled or
chunked. offload: what the host keeps, some of optimizer (its states), parameters (ZeRO 3) and activations, separated by
commas; nvme: drives keep the first two in its place. offload_layers: how many layers offload their activations; by
default all. recompute_layers: how many layers recompute; others keep everything. trainable_layers: how many are
trained, the last ones; all else is frozen. image_tokens: patches of a sample that the frozen vision tower of a
config.json reads; by default it is left out. mean_len: mean tokens of the documents that are packed into a sequence,
with attention within each only. cp_comm_type: how context-parallel ranks communicate, p2p (a ring) or a2a (all-to-alls,
Ulysses). shards: replicas that share states out among them under ZeRO, such as those of a node (PyTorch's HSDP); by
default all. The columns 90% show the interval that contained 9 in 10 held-out measurements; unmeasured settings are
named as extrapolated. The columns MFU and whole count causal attention at half and whole. Names of other tools (tp, dp,
mbs, gbs, …) are read. Degrees can be fixed: tensor, pipeline, context, data, expert, interleave, micro_batch, zero,
recompute (none, selective, full, operators, modules), sequence (0, 1). plan=FILE takes them, the batch and other
settings from a file written by --emit, from a launch script, or from a configuration of DeepSpeed, Accelerate, the
Hugging Face Trainer, LLaMA-Factory, Axolotl or torchtitan, and names the options of such a file that predictions
ignore. Context parallelism with fewer than 4,096 tokens of a sequence per GPU was never measured and is only tried if
context= is given. With many counts, a count is left out if fewer GPUs are as fast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from synergy_core.commands._settings import (
    RequestedModel,
    amount,
    as_text,
    default_batch,
    parse_settings,
    requested_model,
    whole,
    write_whole,
)
from synergy_core.commands._settings import table as aligned
from synergy_core.commands.plan_report import PARTS, model_flops, picture, seconds, why
from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import add_gpu_sheet
from synergy_core.performance.planner.bands import Band, Verdict, memory_band, time_band, verdict
from synergy_core.performance.planner.emitters import (
    PlannedLaunch,
    emitted,
    emitter_for,
    emitter_named,
    emitter_names,
    form_names,
)
from synergy_core.performance.planner.enumerate import FIXABLE
from synergy_core.performance.planner.machine import (
    DEFAULT_SOFTWARE,
    GRADIENT_BYTES,
    Constants,
    Machine,
    OwnConstants,
    Software,
    constants_for,
    constants_like,
    machine_named,
    own_constants,
    running_on,
    software_named,
    with_gradients,
    with_settings,
)
from synergy_core.performance.planner.memory import Memory, memory, usable_bytes, visible_bytes
from synergy_core.performance.planner.options import Stated, rules
from synergy_core.performance.planner.plan import Recompute
from synergy_core.performance.planner.search import PlanTable, search
from synergy_core.performance.planner.tuning import in_words, tuned
from synergy_core.units import DAY_S, HOUR_S

SUMMARY = "find the best parallel plans of a model on given GPUs, and why others are slower"
GIB = 2.0**30
MIN_SLOWDOWN_FRACTION = 5e-4
"""Plans whose step times differ by less count as equally fast: the difference would be printed as 0.0%."""
MIN_COUNTS_FOR_SUMMARY = 4
"""With this many numbers of GPUs or more, only the best plan for each number is shown."""
KEPT_PLANS = 500
"""Fastest plans among which one that surely fits is looked for."""
WHOLE = ("lora", "quantize", "offload_layers", "recompute_layers", "trainable_layers", "mean_len", "shards")
TUNING = ("optimizer", "loss", "offload", "cp_comm_type", *WHOLE)
"""Settings of `tuned`; those in WHOLE are whole numbers."""
MAX_GPUS = 65_536
"""Largest number of GPUs that `plan` tries, and largest length of a range of counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="model=, gpu=, gpus= and the other keys above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every plan shown, with its parts, as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the stages and time against GPUs")
    parser.add_argument(
        "--emit",
        nargs=2,
        action="append",
        default=[],
        metavar=("FORM", "FILE"),
        help="write the best plan for one GPU type and one count as a launch script or configuration; "
        f"FORM: {', '.join(emitter_names())}; FILE: - prints it",
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to `plan` and its answers, one for each GPU type. find: searches a machine with a changed software.
    constants: those that predict step times on a machine: the user's own, or else the shipped ones. notes: sentences
    about plan=FILE: what it chose, and what it says that is not modelled."""

    query: SimpleNamespace
    model: RequestedModel
    batch: int
    stated: str
    answers: list[PlanAnswer]
    find: Callable[..., PlanTable]
    constants: Callable[[Machine, Software], Constants]
    notes: tuple[str, ...]


def in_our_names(settings: Sequence[str]) -> list[str]:
    """The settings with names of other tools replaced by ours. Raises InputError for those that no setting has."""
    result, names = [], rules("plan")
    setting_of = {other: setting for setting, others in names["settings"].items() for other in others}
    for setting in settings:
        key, equals, value = setting.partition("=")
        plain = key.lower().replace("-", "_")
        if plain in names["instead"]:
            raise InputError(f"{setting}: {names['instead'][plain]}.")
        result.append(f"{setting_of.get(plain, key)}{equals}{value}")
    return result


def asked(settings: Sequence[str], replacing: Collection[str] = ()) -> Asked:
    """Answers a question that is given as KEY=VALUE. replacing: settings that replace those of plan=FILE; others may
    not contradict them.

    Raises InputError for settings that are wrong or contradict each other.
    """
    query = _read_settings(in_our_names(settings))
    stated, notes = _read_plan(query.plan, query, replacing) if query.plan else (Stated({}), ())
    query.software = query.software or DEFAULT_SOFTWARE
    model = requested_model(query.model, query.seq_len, query.image_tokens)
    seq_len = model.architecture.limits().seq_len
    for key in ("tokens", "mean_len"):
        if getattr(query, key) is not None and not seq_len:
            raise InputError(f"{key}=: {query.model} does not read tokens; leave {key}= out.")
    software = software_named(query.software)
    if query.gradients:
        software = with_gradients(software, query.gradients)
    of_model = {key: to(model.architecture) if callable(to) else to for key, to in stated.changed.items()}
    tuning = {name: getattr(query, name) for name in TUNING}
    software = with_settings(tuned(software, **tuning, layers=model.architecture.limits().layers), **of_model)
    batch = query.batch or default_batch(model.architecture)
    machines = [_machine(name, query) for name in query.gpu]
    stacks = {machine.gpu.name: running_on(software, machine.gpu) for machine in machines}
    own = _own_constants(query, machines)

    def constants(machine: Machine, stack: Software) -> Constants:
        return (own.of(machine.gpu) if own else None) or constants_for(machine, stack)

    def find(machine: Machine, counts: Sequence[int], keep: int = 0, **changed: Any) -> PlanTable:
        stack = with_settings(stacks[machine.gpu.name], **changed)
        options: dict[str, Any] = {"counts": counts, "global_batch": batch, "keep": keep, "fixed": query.fixed}
        return search(model.family, model.architecture, machine, stack, constants(machine, stack), **options)

    flops, whole_flops = (
        model_flops(model.family, model.architecture, software, causal_share=share) * batch for share in (0.5, 1.0)
    )
    answers = []
    for machine, price in zip(machines, query.price, strict=True):
        stack = stacks[machine.gpu.name]
        table = find(machine, query.gpus, query.top - 1)
        is_own, band, source = own is not None and own.of(machine.gpu) is not None, None, ""
        if own:
            band = own.bands.get(constants_like(machine.gpu))
            shipped = f"shipped constants: {own.path} has none for {machine.gpu.name}"
            source = f"constants of {own.path}" if is_own else shipped
        times = {
            gpus: None if is_own and band is None else time_band(machine, stack, model.architecture, gpus, band)
            for gpus in dict.fromkeys(table.gpus.tolist())
        }
        of_memory = memory_band(stack, model.architecture)
        whole, tokens = whole_flops / flops, batch * seq_len
        answers.append(PlanAnswer(table, stack, flops, whole, tokens, price, times, of_memory, source))
    words = f"{software.name}, gradients in {query.gradients}" if query.gradients else software.name
    words += in_words(**tuning)
    return Asked(query, model, batch, words, answers, find, constants, notes)


def run(chosen: argparse.Namespace) -> int:
    """Prints the plans and writes the requested files. Returns 1 if no count of GPUs has a plan."""
    if chosen.picture is not None and chosen.picture.suffix != ".svg":
        raise InputError(f"--picture {chosen.picture}: the picture is SVG; give a name that ends in .svg.")
    found = asked(chosen.settings)
    query, answers = found.query, found.answers
    if chosen.emit and (len(query.gpu), len(query.gpus)) != (1, 1):
        raise InputError("--emit writes one plan; give one GPU type in gpu= and one count in gpus=.")
    for form, _ in chosen.emit:
        emitter_for(form, query.software)
    default = "" if query.batch else " (default; batch=… sets it)"
    print(f"{query.model}, batch {found.batch}{default}, {found.stated}")
    for note in found.model.notes:
        print(f"  {note}")
    for answer in answers:
        _print_plans(answer)
        if answer.constants:
            print(f"  {answer.constants}")
        sentences = [*_safest(found, answer), *_unsharded(answer)]
        if not len(answer.table):
            sentences += _leaner(found, answer)
            if "data" in query.fixed:
                sentences.append("fits, with the same settings, tries what would make it fit.")
            else:
                sentences.append(_smallest_fitting(answer.table, found.find))
        for sentence in sentences:
            print(f"  {sentence}")
        if len(answer.table) and query.tokens is not None:
            _print_training(answer, query.tokens)
    for note in found.notes:
        print(f"  {note}")
    if chosen.json:
        gpu_types = [_as_json(answer, query.tokens) for answer in answers]
        content = {"model": query.model, "batch": found.batch, "software": query.software, "gpu_types": gpu_types}
        content |= {"notes": found.notes} if found.notes else {}
        write_whole(chosen.json, json.dumps(content, indent=1) + "\n")
    if chosen.picture:
        write_whole(chosen.picture, picture(query.model, [answer.table for answer in answers]))
    if chosen.emit and len(answers[0].table):
        _emit(chosen.emit, found)
    return 0 if any(len(answer.table) for answer in answers) else 1


def _read_settings(settings: Sequence[str]) -> SimpleNamespace:
    """Reads the settings by key, and adds `fixed`, the degrees of parallelism that are set. `price` has one entry per
    GPU type. Raises InputError for unknown or missing keys and for text that is not a number."""
    price = "the price of a GPU-hour, such as 2.50"
    readers: dict[str, Callable[[str, str], Any]] = {
        **dict.fromkeys(("model", "software", "link", "gradients", "optimizer", "loss", "cp_comm_type"), as_text),
        **dict.fromkeys(("constants", "plan"), lambda _, text: Path(text)),
        **dict.fromkeys(("batch", "top", "gpus_per_node", "seq_len", "image_tokens", *WHOLE), whole),
        **dict.fromkeys(FIXABLE, lambda key, text: whole(key, text, minimum=0)),
        "recompute": _recompute,
        "offload": lambda _, text: ",".join(sorted({*text.split(",")})),
        "gpu": lambda _, text: tuple(text.split(",")),
        "gpus": _counts,
        "network": lambda key, text: amount(key, text, "bytes/s per GPU, such as 25e9"),
        "tokens": lambda key, text: amount(key, text, "tokens, such as 300B or 15T", takes_suffix=True),
        "price": lambda key, text: tuple(amount(key, part, price) for part in text.split(",")),
    }
    required = {"model": "gpt-175b", "gpu": "a100-80gb", "gpus": "1024"}
    query = parse_settings(settings, readers, required, top=5, price=(None,))
    query.fixed = {key: getattr(query, key) for key in FIXABLE if getattr(query, key) is not None}
    prices, types = len(query.price), len(query.gpu)
    if query.price[0] is not None and query.tokens is None:
        raise InputError("price= requires the length of the training; give tokens= too, such as tokens=15T.")
    if prices not in (1, types):
        typed = ",".join(f"{price:g}" for price in query.price)
        raise InputError(f"price={typed}: {prices} prices for {types} GPU types; give one for all or one for each.")
    query.price = query.price * (types // prices)
    return query


def _recompute(key: str, text: str) -> int:
    """Reads a way to recompute by its number or its name, such as `full`."""
    names = {each.label: each.value for each in Recompute}
    if text.isalpha() and text not in names:
        raise unknown(key, text, names)
    return int(names[text]) if text in names else whole(key, text, minimum=0)


def _counts(key: str, text: str) -> tuple[int, ...]:
    """Reads numbers of GPUs: counts and ranges such as `8..1024`, separated by commas."""
    counts: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = whole(key, low)
        last = whole(key, high) if dots else first
        if last < first:
            raise InputError(f"{key}={part}: the range is empty; put the smaller count first.")
        if last - first > MAX_GPUS:
            raise InputError(f"{key}={part}: {last - first + 1:,} counts; expected at most {MAX_GPUS:,}.")
        counts += range(first, last + 1)
    return tuple(dict.fromkeys(counts))


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The plans of a model on one GPU type, and what is needed to print them."""

    table: PlanTable
    """The plans, with their step times and memory."""
    software: Software
    """The training stack, as it runs on this GPU type."""
    step_flops: float
    """FLOPs of the model in a step, with causal attention counted at half."""
    whole_attention: float
    """FLOPs with causal attention counted whole ÷ step_flops."""
    step_tokens: int
    """Tokens per step."""
    price: float | None
    """Price of a GPU-hour; None if the user gave none."""
    time_bands: dict[int, Band | None]
    """Error intervals of step times, by number of GPUs; None if a user's own constants have none."""
    memory_band: Band
    """Error interval of memory."""
    constants: str
    """Origin of the constants, in words; "" if they are the shipped ones and the user gave none."""

    def basis(self) -> list[str]:
        """Sentences that name the held-out measurements behind the bands, and what is extrapolated."""
        known = [each for each in self.time_bands.values() if each]
        result = ["no band of step times: the constants file has none"] if len(known) < len(self.time_bands) else []
        if known:
            result.append(f"90%: the interval of 9 in 10 measurements, by {known[0].basis}")
        phrases = dict.fromkeys(phrase for each in known for phrase in each.extrapolated)
        result += [f"extrapolated, so the interval is wider: {'; '.join(phrases)}"] if phrases else []
        more = self.memory_band.extrapolated
        return result + ([f"extrapolated: {'; '.join(more)}"] if more else [])

    def plans(self, table: PlanTable) -> list[dict[str, Any]]:
        """The plan of each row of `table`, with what is printed about it and written by --json."""
        result = []
        peak = table.machine.gpu.matrix_flops_per_s(self.software.precision)
        for row, rank in enumerate(table.rank.tolist()):
            gpus, step_s = int(table.gpus[row]), float(table.step_time_s[row])
            memory_bytes, best_s = float(table.memory_bytes[row]), float(table.step_time_s[row - rank])
            band, mfu = self.time_bands[gpus], self.step_flops / (step_s * (peak * gpus))
            plan = {
                "gpus": gpus,
                "nodes": int(table.nodes[row]),
                "rank": rank,
                "plan": table.plans.plan(row),
                "step_time_s": step_s,
                "step_time_band_s": band and band.of(step_s),
                "memory_bytes": memory_bytes,
                "memory_band_bytes": self.memory_band.of(memory_bytes),
                "extrapolated": [*(band.extrapolated if band else ()), *self.memory_band.extrapolated],
                "mfu": mfu,
                "mfu_with_whole_attention": mfu * self.whole_attention,
                "parts": {name: float(getattr(table.parts, name)[row]) for name in PARTS},
            }
            if rank:
                plan["why"] = why(table, row, row - rank)
                plan["told_apart"] = bool(band and band.can_tell_apart(best_s, step_s))
            result.append(plan)
        return result

    def trainings(self, table: PlanTable, tokens: float) -> list[dict[str, Any]]:
        """Days, GPU-hours and cost of a whole training of `tokens` under the plan of each row of `table`.

        cost: None without a price. band: the factors from these figures to the ends of their interval, or None."""
        result = []
        for gpus, step_s in zip(table.gpus.tolist(), table.step_time_s.tolist(), strict=True):
            seconds = tokens / self.step_tokens * step_s
            hours = gpus * seconds / HOUR_S
            cost = None if self.price is None else hours * self.price
            rate, days = self.step_tokens / step_s, seconds / DAY_S
            band = self.time_bands[gpus]
            factors = band and (band.low, band.high)
            figures = {"gpus": gpus, "tokens_per_s": rate, "days": days, "gpu_hours": hours, "cost": cost}
            result.append(figures | {"band": factors})
        return result


def _as_json(answer: PlanAnswer, tokens: float | None) -> dict[str, Any]:
    """Builds the entry of one GPU type for the file of `--json`."""
    result: dict[str, Any] = {
        "gpu": answer.table.machine.gpu.name,
        "precision": answer.software.precision,
        "gradient_bytes": answer.software.gradient_bytes,
        "basis": answer.basis(),
        "plans": [{**each, "plan": each["plan"].as_dict()} for each in answer.plans(answer.table)],
        "infeasible": [
            {name: value for name, value in asdict(each).items() if name != "leanest"}
            for each in answer.table.infeasible
        ],
    }
    if tokens is not None:
        result["tokens"] = tokens
        result["trainings"] = answer.trainings(answer.table.best(), tokens)
    return result


def _print_plans(answer: PlanAnswer) -> None:
    """Prints the machine, a table of plans, why some are slower, and which numbers of GPUs have no plan."""
    table, machine = answer.table, answer.table.machine
    print(
        f"\n{machine.gpu.title}, {usable_bytes(machine) / GIB:.1f} GiB usable of {machine.memory_bytes / 1e9:.0f}, "
        f"{machine.gpus_per_node} per node\n  {machine.link_bytes_per_s / 1e9:.0f} GB/s within nodes, "
        f"{machine.network_bytes_per_s / 1e9:.1f} GB/s between, {answer.software.precision}"
    )
    if not machine.gpu.has_fused_attention:
        print("  attention is not fused: FlashAttention does not run on these GPUs")
    counts, limit = set(table.gpus.tolist()), visible_bytes(machine) / GIB
    is_summary = len(counts) + len(table.infeasible) >= MIN_COUNTS_FOR_SUMMARY
    shown = table.efficient() if is_summary else table
    used = [name for name in PARTS if (getattr(shown.parts, name) > 0.005 * shown.step_time_s).any()]
    mfus = {"MFU": "mfu", "whole": "mfu_with_whole_attention"} if answer.whole_attention > 1.0 else {"MFU": "mfu"}
    rows, remarks, best_s = [], [], 0.0
    for each in answer.plans(shown):
        plan, step_s, band = each["plan"].describe(), each["step_time_s"], each["step_time_band_s"]
        low, high = (end / GIB for end in each["memory_band_bytes"])
        rows.append(
            [
                *(str(each["gpus"]), plan, seconds(step_s), spread(band[0], band[1], seconds) if band else "–"),
                *(f"{each['memory_bytes'] / GIB:.1f} GiB", spread(low, high, "{:.1f}".format)),
                *(f"{each[name]:.1%}" for name in mfus.values()),
                *(f"{each['parts'][name] / step_s:.0%}" for name in used),
            ]
        )
        best_s = best_s if each["rank"] else step_s
        if each["rank"]:
            slowdown = step_s / best_s - 1.0
            remark = f"is {slowdown:.1%} slower: {each['why']}"
            if slowdown < MIN_SLOWDOWN_FRACTION:
                remark = "is as fast"
            elif band and not each["told_apart"]:
                remark = f"cannot be told apart from the fastest ({slowdown:.1%} slower: {each['why']})"
            remarks.append(f"  {each['gpus']}: {plan} {remark}")
        if high > limit:
            lacking = f"the upper end of its memory is {high - limit:.1f} GiB too much"
            remarks.append(f"  {each['gpus']}: {plan} may not fit: {lacking}")
    if rows:
        header = ("gpus", "plan", "step", "90%", "memory", "90%", *mfus, *(PARTS[each] for each in used))
        print(aligned(header, rows, left=2))
        attention = "; causal attention at half, or whole, as PaLM and Megatron-LM count it" if len(mfus) > 1 else ""
        print(f"  MFU: FLOPs of the model without recomputation ÷ the GPUs' peak{attention}")
        for sentence in answer.basis():
            print(f"  {sentence}")
    for line in remarks:
        print(line)
    if len(shown) < len(counts):
        print(f"  {len(counts) - len(shown)} counts are left out: fewer GPUs are as fast.")
    # For each factor that rules out plans: the count of GPUs that lacks the least memory, and how many others fail.
    for factor in dict.fromkeys(each.factor for each in table.infeasible):
        failed = [each for each in table.infeasible if each.factor == factor]
        nearest = min(failed, key=lambda each: each.missing_bytes)
        others = f" ({len(failed) - 1} other counts fail on {factor} too)" if len(failed) > 1 else ""
        print(f"  no plan on {counted(nearest.gpus)}, {factor}: {nearest.message}{others}.")
        needed = nearest.missing_bytes + usable_bytes(machine)
        if factor == "memory" and verdict(needed, answer.memory_band, machine) is Verdict.MAY:
            interval = spread(*answer.memory_band.of(needed / GIB), "{:.1f}".format)
            print(f"  It may fit: the interval is {interval} GiB, and a process can use {limit:.1f}.")


def surely_fitting(found: Asked, answer: PlanAnswer) -> tuple[PlanTable, int | None]:
    """Plans for one number of GPUs, fastest first, and the row of the first whose whole band fits; None without any."""
    plans = found.find(answer.table.machine, found.query.gpus, KEPT_PLANS)
    verdicts = (verdict(needed, answer.memory_band, plans.machine) for needed in plans.memory_bytes)
    return plans, next((row for row, each in enumerate(verdicts) if each is Verdict.FITS), None)


def _safest(found: Asked, answer: PlanAnswer) -> Iterator[str]:
    """Yields a sentence with the fastest plan that surely fits if the fastest of all may not, for one count of GPUs."""
    table = answer.table
    if len(found.query.gpus) > 1 or not len(table):
        return
    if verdict(table.memory_bytes[0], answer.memory_band, table.machine) is Verdict.FITS:
        return
    every, row = surely_fitting(found, answer)
    if row is None:
        yield f"None of them surely fits; python -m synergy_core fits {found.query.model} … says what would."
        return
    slower = float(every.step_time_s[row] / every.step_time_s[0]) - 1.0
    size = float(every.memory_bytes[row]) / GIB
    yield f"{every.plans.plan(row).describe()} surely fits: {size:.1f} GiB, {slower:.1%} slower than the fastest."


def _unsharded(answer: PlanAnswer) -> Iterator[str]:
    """Yields a sentence if plans have a single replica although the software always shards: there it holds all."""
    plans, zeros = answer.table.plans, answer.software.supports.zeros
    lone = np.unique(plans.gpus[plans.data * plans.context == 1]).tolist()
    if lone and 0 not in zeros:
        stages, counts = (" or ".join(map(str, each)) for each in (zeros, lone))
        yield (
            f"{answer.software.name} shards over replicas (ZeRO {stages}): plans with one replica (gpus={counts}) hold "
            "weights, gradients and optimizer whole."
        )


def counted(gpus: int) -> str:
    """Formats a number of GPUs, such as `1 GPU` or `8 GPUs`."""
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


def host_memory(needs: Memory, machine: Machine) -> str:
    """How much memory of a node's host an offloaded plan needs, in words. needs: of one plan."""
    known = f"of {machine.host_bytes / 1e9:,.0f} GB" if machine.host_bytes else "(its size is unknown)"
    size = float(needs.node_host(machine)[0]) / 1e9
    return f"{size:,.{0 if size >= 10.0 else 1}f} GB {known} on each node's host"


def _leaner(found: Asked, answer: PlanAnswer) -> Iterator[str]:
    """Yields a sentence for each setting, gradients in bf16 or offloading, with which a plan fits on the number of GPUs
    that lacks the least memory."""
    table, software = answer.table, answer.software
    lacking = [each for each in table.infeasible if each.factor == "memory"]
    if not lacking:
        return
    count = min(lacking, key=lambda each: each.missing_bytes).gpus
    ways: dict[str, dict[str, Any]] = {}
    if "bf16" in software.supports.gradients and software.gradient_bytes > GRADIENT_BYTES["bf16"]:
        ways["With gradients=bf16"] = {"gradient_bytes": GRADIENT_BYTES["bf16"]}
    if "offload" in software.supports.tunings and not software.run.offload:
        ways["With the optimizer offloaded to the host (ZeRO-Offload, 8 threads a GPU)"] = {"offload": ("optimizer",)}
    for way, changed in ways.items():
        plans = found.find(table.machine, [count], **changed)
        if len(plans):
            step_s, stack = seconds(float(plans.step_time_s[0])), with_settings(software, **changed)
            best = plans.plans.take(np.array([0]))
            needs = memory(found.model.family.work(found.model.architecture, best, stack), best, stack)
            host = f", {host_memory(needs, table.machine)}" if stack.run.offload else ""
            size = f"{float(needs.needed[0]) / GIB:.1f} GiB{host}"
            enough = f"{counted(count)} suffice{'s' if count == 1 else ''}"
            yield f"{way}, {enough}: {best.plan(0).describe()}, {step_s}, {size}."


def _smallest_fitting(table: PlanTable, find: Callable[..., PlanTable]) -> str:
    """A sentence with the smallest number of GPUs that the model fits on, if the number of nodes is a power of two."""
    tried, node = max(each.gpus for each in table.infeasible), table.machine.gpus_per_node
    counts = [node << doublings for doublings in range(MAX_GPUS.bit_length())]
    if larger := [each for each in counts if tried < each <= MAX_GPUS]:
        found = find(table.machine, larger)
        if len(found):
            plan = found.plans.plan(0).describe()
            return f"The model fits on {counted(int(found.gpus[0]))}, the fewest among powers of two of nodes: {plan}."
    return f"No power of two of nodes up to {MAX_GPUS} GPUs has a plan; change the settings named above."


def _print_training(answer: PlanAnswer, tokens: float) -> None:
    """Prints days, GPU-hours and cost of a whole training as a table."""
    best = answer.table.best()
    shown = answer.table.efficient() if len(best) >= MIN_COUNTS_FOR_SUMMARY else best
    columns = {"days": "days", "GPU-hours": "gpu_hours", **({} if answer.price is None else {"cost": "cost"})}

    def with_band(value: float, band: tuple[float, float] | None) -> str:
        return f"{short(value)} ({spread(band[0] * value, band[1] * value, short)})" if band else short(value)

    rows = [
        [
            str(training["gpus"]),
            short(training["tokens_per_s"]),
            *(with_band(training[name], training["band"]) for name in columns.values()),
        ]
        for training in answer.trainings(shown, tokens)
    ]
    print(
        f"\n  {short(tokens)} tokens, {short(answer.step_tokens)} a step; without failures, evaluation and checkpoints"
    )
    print(aligned(("gpus", "tokens/s", *columns), rows))


def spread(low: float, high: float, formatted: Callable[[float], str]) -> str:
    """Formats an interval, with a shared unit only once: `94.6–251 s`, `980 ms–1.21 s`."""
    first, last = formatted(low), formatted(high)
    unit = first.lstrip("0123456789.")
    return f"{first.removesuffix(unit) if unit and last.endswith(unit) else first}–{last}"


def short(value: float) -> str:
    """Formats a number with three digits: `1.41M`, `15T`."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    size, letter = next((each for each in sizes if value >= 0.9995 * each[0]), (1.0, ""))
    digits = value / size
    return f"{digits:.3g}{letter}" if digits < 999.5 else f"{digits:.0f}{letter}"


# Writes a plan as a launch script or configuration of a training stack, and reads one back.


def _emit(requested: Sequence[Sequence[str]], found: Asked) -> None:
    """Writes the best plan in every requested format. requested: (format, file) pairs. If a format cannot express the
    plan, raises InputError before any file is written."""
    (answer,), model, query = found.answers, found.model, found.query
    plan, per_node = answer.table.plans.plan(0), answer.table.machine.gpus_per_node
    launch = PlannedLaunch(plan, model.name, model.architecture, answer.software, per_node)
    texts = [emitted(form, launch) for form, _ in requested]
    for (form, path), text in zip(requested, texts, strict=True):
        if path == "-":
            print()
            sys.stdout.write(text)
            continue
        write_whole(Path(path), text)
        emitter = emitter_named(form)
        print(f"\nwrote {path}, {emitter.SUMMARY}: {plan.describe()}\n  {emitter.beside(launch)}")
        states = emitter.read(text, plan.gpus, Path()).settings if emitter.recognises(text) else {}
        typed = {name: value for name in TUNING if (value := getattr(query, name)) is not None}
        if absent := [f"{name}={value}" for name, value in typed.items() if states.get(name) != value]:
            print(f"  not in the file: {', '.join(absent)}; set this in the training script")


def _read_plan(path: Path, query: SimpleNamespace, replacing: Collection[str]) -> tuple[Stated, tuple[str, ...]]:
    """Adds what a file says to the settings. Returns it, and sentences about what it chose and what is not modelled.

    replacing: settings that may replace the file's. Raises InputError if the settings contradict the file otherwise,
    and for a file in an unknown format."""
    if len(query.gpus) != 1:
        raise InputError(f"plan={path} is a plan for one count of GPUs; give one, such as gpus={query.gpus[0]}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan={path}: cannot be read ({getattr(error, 'strerror', None) or 'not text'}).") from None
    form = next((each for each in map(emitter_named, form_names()) if each.recognises(text)), None)
    if form is None:
        raise InputError(f"plan={path}: has none of the forms that are read: {', '.join(form_names())}.")
    try:
        stated = form.read(text, query.gpus[0], path.parent)
        typed = {key: value for key, value in vars(query).items() if key != "fixed"}
        settings = stated.completed(typed, query.gpus[0], replacing)
    except InputError as error:
        raise InputError(f"plan={path}: {error}") from None
    software = stated.software or form.SOFTWARE[0]
    notes = []
    if query.software is None and software != DEFAULT_SOFTWARE:
        notes.append(f"software={software}, chosen from {path.name}; software=… sets another")
    elif query.software not in (None, *form.SOFTWARE):
        readers = ", ".join(form.SOFTWARE)
        raise InputError(f"plan={path} is read by {readers}, not by {query.software}; type software={software}.")
    elif stated.software and query.software != stated.software:
        notes.append(f"{path.name} is for {stated.software}, and predicted under {query.software}")
    notes += [f"{why}; {key}=… sets it" for key, (_, why) in stated.assumed.items() if typed.get(key) is None]
    notes += [f"not modelled: {phrase}" for phrase in stated.not_modelled]
    vars(query).update({"software": software} | settings)
    query.fixed = {key: settings[key] for key in FIXABLE if settings.get(key) is not None}
    return stated, tuple(notes)


# The machines that `plan` searches plans for, and a user's own constants that predict their step times.


def _machine(name: str, query: SimpleNamespace) -> Machine:
    """The machine that a user names: by a GPU type, a node type, or a file with a data sheet."""
    if not name.endswith((".yaml", ".yml")):
        return machine_named(name, query.gpus_per_node, query.network, link=query.link)
    sheet = add_gpu_sheet(Path(name))
    link = query.link or ("nvswitch" if sheet.link_bytes_per_s else "pcie")
    return machine_named(sheet.name, query.gpus_per_node, query.network, link=link)


def _own_constants(query: SimpleNamespace, machines: Sequence[Machine]) -> OwnConstants | None:
    """The user's constants. Raises InputError if they are for other software or for none of the GPU types."""
    if query.constants is None:
        return None
    own = own_constants(query.constants)
    if own.software not in (None, query.software):
        raise InputError(f"constants={query.constants} is for {own.software}; type software={own.software}.")
    if all(own.of(each.gpu) is None for each in machines):
        known = ", ".join(own.gpu_types)
        raise InputError(f"constants={query.constants} is for {known}; type gpu={known}.")
    return own
