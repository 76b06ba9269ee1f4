"""Fits of the catalog's constants to measurements, and the other files that a program of ours makes: bench/fits.py.

Each file with a `SUMMARY` and a `fit` is one. The others hold what several of them need.
"""

from __future__ import annotations

from typing import NamedTuple


class Made(NamedTuple):
    """files: the text of each file that a fit makes, by path relative to the repository. report: what it prints."""

    files: dict[str, str]
    report: str
