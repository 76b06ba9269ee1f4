"""Statistics of the 82,247 jobs of Philly's log from which jobs are drawn: aggregates, never rows.

Only figures that follow from the jobs are replaced. The file's other figures and its sentences are written by hand.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from runner.experiment import ROOT, data_file
from scipy.special import ndtri

from fits import Made

SUMMARY = "traces/philly.json: statistics of Philly's log, from which jobs are drawn (needs: data)"
PROBABILITIES = (0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.775, 0.8, 0.825, 0.85, 0.9)
TAIL = (0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.9975, 0.999, 1)
FEW = (0, 0.25, 0.5, 0.75, 1)
FEW_JOBS = 50
MIN_JOBS_OF_TENANT = 100
CHECKED = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
CLASSES = {"all": (1, 999), "1": (1, 1), "2-4": (2, 4), "5-8": (5, 8), ">8": (9, 999)}
JOBS_BEYOND_A_QUANTILE = 10


def quantiles(seconds: pd.Series, at: tuple[float, ...]) -> dict[str, float]:
    return {f"{p:g}": round(float(seconds.quantile(p)), 1) for p in at}


def rounded_fractions(values: pd.Series, digits: int) -> dict[str, float]:
    """How often each value occurs, in the order of the values."""
    return {str(value): round(part, digits) for value, part in values.value_counts(normalize=True).sort_index().items()}


def percentages(values: pd.Series) -> list[float]:
    return [round(100 * part, 3) for part in values.value_counts(normalize=True).sort_index()]


def jobs_of_log() -> pd.DataFrame:
    """The jobs; `at`: when submitted; `score`: the normal score of the run time among jobs of its size."""
    jobs = pd.read_csv(data_file("traces", "philly.csv"), skip_blank_lines=True, dtype={"cluster": str})
    jobs["at"] = pd.to_datetime(jobs["timestamp"])
    jobs["gpu_s"] = jobs["duration"] * jobs["num_gpus"]
    by_size = jobs.groupby("num_gpus")["duration"]
    jobs["score"] = ndtri((by_size.rank() - 0.5) / by_size.transform("size"))
    return jobs


def arrivals(jobs: pd.DataFrame) -> dict[str, Any]:
    hourly = jobs.set_index("at").resample("1h").size()
    return {
        "mean_per_hour": round(float(hourly.mean()), 3),
        "index_of_dispersion": round(float(hourly.var() / hourly.mean()), 1),
        "hour_of_day_percent": percentages(jobs["at"].dt.hour),
        "weekday_percent": percentages(jobs["at"].dt.day_of_week),
        "most_per_hour": int(hourly.max()),
    }


def tenants(jobs: pd.DataFrame) -> list[dict[str, Any]]:
    """The tenants' shares of jobs, largest first."""
    nodes = pd.read_csv(data_file("traces", "philly_vc_nodes.csv"), dtype={"vc": str}).set_index("vc")["node num"]
    counts = jobs.groupby("cluster")["cluster"].transform("size")
    found = [
        {
            "name": name,
            "nodes": int(nodes[name]),
            "fraction": round(len(each) / len(jobs), 6),
            "duration_score": round(float(each["score"].mean()), 3),
            "sizes": rounded_fractions(each["num_gpus"], 6),
        }
        for name, each in jobs[counts >= MIN_JOBS_OF_TENANT].groupby("cluster")
    ]
    return sorted(found, key=lambda tenant: -tenant["fraction"])


def checked(jobs: pd.DataFrame) -> dict[str, Any]:
    """Figures with which drawn jobs are compared. Quantiles of run times beyond which few jobs lie are left out."""
    by_class = {}
    for name, (least, most) in CLASSES.items():
        seconds = jobs.loc[jobs["num_gpus"].between(least, most), "duration"]
        known = tuple(p for p in CHECKED if (1 - p) * len(seconds) >= JOBS_BEYOND_A_QUANTILE or p <= 0.9)
        by_class[name] = quantiles(seconds, known)
    gpu_time = jobs.groupby("num_gpus")["gpu_s"].sum() / jobs["gpu_s"].sum()
    return {
        "mean_s": round(float(jobs["duration"].mean()), 1),
        "median_s": float(jobs["duration"].median()),
        "mean_gpus": round(float(jobs["num_gpus"].mean()), 4),
        "gpu_s_per_job": round(float(jobs["gpu_s"].mean()), 1),
        "gpu_time_fraction": {str(size): round(float(x), 5) for size, x in gpu_time.items()},
        "quantiles_s": by_class,
    }


def fit() -> Made:
    jobs, path = jobs_of_log(), "traces/philly.json"
    whole = json.loads((ROOT / path).read_text(encoding="utf-8"))
    block = whole["generators"]["philly"]
    block["arrivals"] |= arrivals(jobs)
    block["sizes"]["fractions"] = rounded_fractions(jobs["num_gpus"], 8)
    block["virtual_clusters"]["each"] = tenants(jobs)
    block["durations"]["quantiles_s"] = {
        str(size): quantiles(each, FEW if len(each) < FEW_JOBS else PROBABILITIES + TAIL)
        for size, each in jobs["duration"].groupby(jobs["num_gpus"].replace({128: 64}))
    }
    block["checked"] |= checked(jobs)
    return Made({path: json.dumps(whole, indent=1, ensure_ascii=False) + "\n"}, f"{len(jobs):,} jobs")
