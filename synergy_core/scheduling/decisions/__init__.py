"""Schedulers, which run policies.

For ordering policies there are two implementations with the same decisions: `lanes` for one GPU type without borrowing,
and the slower `trial` for all other clusters.
"""

from __future__ import annotations
