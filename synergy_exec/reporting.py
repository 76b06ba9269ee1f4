"""Progress reports of a job that is a command (docs/executor.md). It needs only the standard library."""

import json
import os


def report(step: int, loss: float | None = None) -> None:
    """Reports the step and its loss to Synergy. On ranks other than 0, or outside Synergy, it does nothing."""
    path = os.environ.get("SYNERGY_REPORT")
    if path and os.environ.get("RANK", "0") == "0":
        line = {"step": step} if loss is None else {"step": step, "loss": loss}
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
