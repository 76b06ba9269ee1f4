"""Exit codes of a worker, beside 0 (done) and PAUSED (saved and left as asked)."""

from __future__ import annotations

FAILED = 1
"""The job's own error."""
PEER_LOST = 76
"""Another rank is gone or silent (EX_PROTOCOL); why, that one or its agent knows."""
