"""Fits of the catalog's constants to measurements, and the other files that a program of ours makes: bench/fits.py.

Each file with a `SUMMARY` and a `fit` is one. The others hold what several of them need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from synergy_core.performance.goodput.calibration import accuracy
from synergy_core.units import Floats

MEASURED, LARGEST, GPU_TYPE = "in sample", "largest out", "GPU type out"
"""Which rows a fit did not see: none; those of the largest models; those of the row's GPU type."""


class Made(NamedTuple):
    """files: the text of each file that a fit makes, by path relative to the repository. report: what it prints."""

    files: dict[str, str]
    report: str


def told(rows: pd.DataFrame, how: str, predicted_s: Floats | pd.Series) -> pd.DataFrame:
    """Returns rows with measured and predicted times. how: what was left out of the fit."""
    return rows.assign(how=how, predicted_s=predicted_s, error=np.log(rows["time_s"] / predicted_s))


def scored(rows: pd.DataFrame, *by: str) -> list[dict[str, Any]]:
    """Accuracy of predicted_s on time_s, and the columns by whose values rows are scored."""
    return [
        {**dict(zip(by, key, strict=True)), **asdict(accuracy(*members[["predicted_s", "time_s"]].to_numpy().T))}
        for key, members in rows.groupby(list(by), sort=False)
    ]


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def sums(paths: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of the files that a fit read."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


def constants_file(name: str, comment: str, content: dict[str, Any]) -> dict[str, str]:
    """The content of a file in catalog/constants, by its path."""
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    return {f"synergy_core/performance/catalog/constants/{name}.yaml": f"# Fitted by bench/fits.py {comment}\n{text}"}
