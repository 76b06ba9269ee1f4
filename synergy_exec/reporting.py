"""For a job that is a command (docs/executor.md): says how far it is. It needs nothing but Python itself."""

import json
import os


def report(step: int, loss: float | None = None) -> None:
    """Notes the step, and its loss, where Synergy shows them. Elsewhere, and on ranks other than 0, it does nothing."""
    path = os.environ.get("SYNERGY_REPORT")
    if path and os.environ.get("RANK", "0") == "0":
        line = {"step": step} if loss is None else {"step": step, "loss": loss}
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
