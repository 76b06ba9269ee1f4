"""Who held which GPUs when, packed for the report's Gantt chart, which draws the page that is looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from synergy_runs.report.excerpt import Held, slots_held
from synergy_runs.report.packed import packed_columns, steps_of, unit_for

_LOW_BITS = np.uint64(0xFFFF_FFFF)


def packed_holdings(held: Held, most: int) -> str:
    """At most `most` stretches in which a job held GPUs of a node, in order of their starts.

    Where there are more, the shortest are left out; the section says how many, how short, and what share of the time.
    """
    length_s = held.end_s - held.start_s
    total, held_s = len(held), float(_gpu_s(held).sum())
    about: dict[str, Any] = {"total": total, "left_out_up_to_s": None, "left_out_share": 0.0}
    if total > most:
        longest = np.argsort(-length_s, kind="stable")
        about["left_out_up_to_s"] = float(length_s[longest[most]])
        held = held.take(np.sort(longest[:most]))
        about["left_out_share"] = 1.0 - float(_gpu_s(held).sum()) / held_s if held_s else 0.0
    unit_s = unit_for(float(held.end_s.max(initial=1.0)))
    about |= {"unit_s": unit_s, "shown": len(held)}
    start, end = steps_of(held.start_s, unit_s), steps_of(held.end_s, unit_s)
    return packed_columns(
        {
            "started_after_last": np.diff(start, prepend=0),
            "length": end - start,
            "node": held.node,
            "low_mask": (held.gpu_mask & _LOW_BITS).astype(np.int64),
            "high_mask": (held.gpu_mask >> np.uint64(32)).astype(np.int64),
            "job": held.job_id,
            "gpus": held.gpus,
        },
        about,
    )


def _gpu_s(held: Held) -> Any:
    return (held.end_s - held.start_s) * slots_held(held)
