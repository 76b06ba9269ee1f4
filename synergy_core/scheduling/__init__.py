"""Schedulers, which run policies.

Two kinds of queue make the same decisions for ordering policies: `lanes` on one GPU type without borrowing, and the
slower `trial` for everything else.
"""

from __future__ import annotations
