"""What `plan` is asked, read from `key=value` arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from synergy_core.commands._asked import amount, given_settings, whole
from synergy_core.errors import InputError

SOFTWARE = "megatron-core"
LARGEST = 65_536
"""Of a cluster, in GPUs, and of a range of counts."""
NUMBERS = ("batch", "top", "gpus_per_node", "seq_len")
OTHERS = ("software", "network", "link", "tokens", "price", "constants", "plan")


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, read from `key=value` arguments. price: of each of `gpu`, or none."""

    model: str
    gpu: tuple[str, ...]
    gpus: tuple[int, ...]
    software: str
    batch: int | None
    top: int
    gpus_per_node: int | None
    network: float | None
    link: str | None
    seq_len: int | None
    tokens: float | None
    price: tuple[float, ...]
    constants: Path | None
    plan: Path | None
    fixed: Mapping[str, int]


def question(settings: Sequence[str]) -> Question:
    """Reads `key=value` arguments. Raises InputError for what is unknown, missing or no number."""
    from synergy_core.planner.enumerate import FIXABLE

    needed = {"model": "gpt-175b", "gpu": "a100-80gb", "gpus": "1024"}
    given = given_settings(settings, (*needed, *OTHERS, *NUMBERS, *FIXABLE), needed)
    if "price" in given and "tokens" not in given:
        raise InputError("price= is of a whole training; give tokens= too, such as tokens=15T.")
    gpu = tuple(given["gpu"].split(","))

    def number(key: str) -> int | None:
        return whole(key, given[key]) if key in given else None

    return Question(
        model=given["model"],
        gpu=gpu,
        gpus=_counts(given["gpus"]),
        software=given.get("software", SOFTWARE),
        batch=number("batch"),
        top=number("top") or 5,
        gpus_per_node=number("gpus_per_node"),
        network=amount("network", given["network"], "bytes/s per GPU, such as 25e9") if "network" in given else None,
        link=given.get("link"),
        seq_len=number("seq_len"),
        tokens=amount("tokens", given["tokens"], "tokens, such as 300B or 15T", large=True)
        if "tokens" in given
        else None,
        price=_prices(given["price"], len(gpu)) if "price" in given else (),
        constants=Path(given["constants"]) if "constants" in given else None,
        plan=Path(given["plan"]) if "plan" in given else None,
        fixed={key: whole(key, given[key], least=0) for key in FIXABLE if key in given},
    )


def _counts(text: str) -> tuple[int, ...]:
    counts: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = whole("gpus", low)
        last = whole("gpus", high) if dots else first
        if last < first:
            raise InputError(f"gpus={part}: the range is empty; expected the smaller count first.")
        if last - first > LARGEST:
            raise InputError(f"gpus={part}: {last - first + 1:,} counts; expected at most {LARGEST:,}.")
        counts += range(first, last + 1)
    return tuple(dict.fromkeys(counts))


def _prices(text: str, types: int) -> tuple[float, ...]:
    """The price of each GPU type."""
    given = [amount("price", each, "the price of an hour of a GPU, such as 2.50") for each in text.split(",")]
    if len(given) not in (1, types):
        raise InputError(f"price={text}: {len(given)} prices for {types} GPU types; give one for all, or one for each.")
    return tuple(given * types if len(given) == 1 else given)
