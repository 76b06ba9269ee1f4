"""Prints the `philly` block of philly.json from the 82,247-job CSV: aggregate statistics only, never rows.

python bench/fit_philly.py $SYNERGY_DATA/traces > traces/philly.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

PROBABILITIES = (0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.775, 0.8, 0.825, 0.85, 0.9)
TAIL = (0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.9975, 0.999, 1)
FEW = (0, 0.25, 0.5, 0.75, 1)
FEW_JOBS = 50
FEWEST_JOBS_OF_A_VC = 100
CHECKED = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
CLASSES = {"all": (1, 999), "1": (1, 1), "2-4": (2, 4), "5-8": (5, 8), ">8": (9, 999)}
JOBS_BEYOND_A_QUANTILE = 10

ATC = "Jeon et al., USENIX ATC'19: 96,260 jobs over 75 days"
RELEASE = "112,956 jobs of the Philly release, in AcmeTrace's cluster_summary.csv"
SOURCES = {
    "subset": "the 82,247 jobs of the release that the Pollux and Sia artifacts use; computed by bench/fit_philly.py",
    "paper": ATC,
    "release": RELEASE,
    "artifact": "nodes of each tenant as HeliosArtifact's QSSF service sets them",
    "ours": "our choice; no source at hand",
}
"""What a figure's label stands for."""
SUBSET = (
    "aggregate of the 82,247-job subset of the Philly release (msr-fiddle/philly-traces, CC BY 4.0) that the Pollux "
    "and Sia artifacts use, 2017-09-04 to 2017-12-22; computed by bench/fit_philly.py"
)
CLUSTER = {
    "nodes": 311,
    "gpus_per_node": 8,
    "from": "paper",
    "source": "2,488 GPUs (Jeon et al., ATC'19), taken as 8-GPU nodes. The subset fills 15 % of them, "
    "and 78 % of 60 nodes",
}
BATCHES = {
    "tail_exponent": {"1": 1.15, "2": 2.4},
    "longest_jobs": 400,
    "from": "subset",
    "source": SUBSET + "; runs of consecutive jobs of one tenant and size: mean 4.5 and 62 % of the jobs in runs of "
    "ten or more with one GPU, mean 1.3 with more. P(run ≥ n) = n^-exponent",
}
USERS = {
    "count": 319,
    "zipf_exponent": 1.0,
    "user_fraction": 0.3,
    "batch_fraction": 0.55,
    "from": "ours",
    "source": "the subset names no users: count and exponent are ours. The two fractions are what a "
    "user and a batch explain of the variance of a job's duration score; their sum is the subset's correlation of "
    "neighbours in a run (0.88)",
}
END_STATES = {
    "completed": {"jobs": 0.693, "gpu_time": 0.445},
    "killed": {"jobs": 0.135, "gpu_time": 0.377},
    "failed": {"jobs": 0.172, "gpu_time": 0.178},
    "from": "paper",
    "source": ATC + "; the subset names no end states, and the release has others: see elsewhere",
}
ELSEWHERE = {
    "mean_s": 18006.055,
    "median_s": 874,
    "mean_gpus": 1.928,
    "completed": {"jobs": 0.604, "gpu_time": 0.321},
    "killed": {"jobs": 0.09, "gpu_time": 0.294},
    "failed": {"jobs": 0.305, "gpu_time": 0.386},
    "waiting_mean_s": 3760.604,
    "waiting_median_s": 189,
    "from": "release",
    "source": RELEASE + ": more and longer jobs than the subset, which is what the generator is fitted to",
}


def quantiles(seconds: pd.Series, at: tuple[float, ...]) -> dict[str, float]:
    return {f"{p:g}": round(float(seconds.quantile(p)), 1) for p in at}


def fractions(values: pd.Series) -> pd.Series:
    """How often each value occurs, in the order of the values."""
    return values.value_counts(normalize=True).sort_index()


def percentages(values: pd.Series) -> list[float]:
    return [round(float(fraction) * 100, 3) for fraction in fractions(values)]


def rows(folder: Path) -> pd.DataFrame:
    """The jobs; `at`: when submitted; `score`: the normal score of the run time among jobs of its size."""
    jobs = pd.read_csv(folder / "philly.csv", skip_blank_lines=True, dtype={"cluster": str})
    jobs["at"] = pd.to_datetime(jobs["timestamp"])
    jobs["gpu_s"] = jobs["duration"] * jobs["num_gpus"]
    by_size = jobs.groupby("num_gpus")["duration"]
    jobs["score"] = ndtri((by_size.rank() - 0.5) / by_size.transform("size"))
    return jobs


def arrivals(jobs: pd.DataFrame) -> dict[str, Any]:
    hourly = jobs.set_index("at").resample("1h").size()
    return {
        "first_day": "2017-10-09",
        "log_dates": ["2017-09-04", "2017-12-23"],
        "mean_per_hour": round(float(hourly.mean()), 3),
        "index_of_dispersion": round(float(hourly.var() / hourly.mean()), 1),
        "hour_of_day_percent": percentages(jobs["at"].dt.hour),
        "weekday_percent": percentages(jobs["at"].dt.day_of_week),
        "most_per_hour": int(hourly.max()),
        "slow_fraction": 0.5,
        "slow_days": 14,
        "hour_to_hour_correlation": 0.3,
        "gap_within_batch": 0.05,
        "from": "subset",
        "source": SUBSET
        + "; index of dispersion of the counts of all 2,615 hours, idle ones too; weekdays from Monday. "
        "The slow part and hour_to_hour_correlation (of the normal scores of hourly counts) and gap_within_batch "
        "(median gap between jobs of one tenant and size 6 s, otherwise 112 s) are rounded from the same subset",
    }


def sizes(jobs: pd.DataFrame) -> dict[str, Any]:
    return {
        "fractions": {str(size): round(float(x), 8) for size, x in fractions(jobs["num_gpus"]).items()},
        "from": "subset",
        "source": SUBSET,
    }


def tenants(jobs: pd.DataFrame, nodes: pd.Series) -> list[dict[str, Any]]:
    """The largest first. nodes: how many each has."""
    found = []
    for name, each in jobs.groupby("cluster"):
        if len(each) >= FEWEST_JOBS_OF_A_VC:
            found.append(
                {
                    "name": name,
                    "nodes": int(nodes[name]),
                    "fraction": round(len(each) / len(jobs), 6),
                    "duration_score": round(float(each["score"].mean()), 3),
                    "sizes": {str(size): round(float(share), 6) for size, share in fractions(each["num_gpus"]).items()},
                }
            )
    return sorted(found, key=lambda tenant: -tenant["fraction"])


def virtual_clusters(jobs: pd.DataFrame, nodes: pd.Series) -> dict[str, Any]:
    return {
        "each": tenants(jobs, nodes),
        "from": "subset",
        "quotas_from": "artifact",
        "source": SUBSET + "; nodes as set in HeliosArtifact's QSSF service (MIT). Four tenants with 18 jobs together, "
        "whose nodes are unknown, are left out. duration_score: mean normal score of a job's duration "
        "rank among jobs of its size",
    }


def durations(jobs: pd.DataFrame) -> dict[str, Any]:
    pooled = jobs["num_gpus"].replace({128: 64})
    laws = {
        str(size): quantiles(each, FEW if len(each) < FEW_JOBS else PROBABILITIES + TAIL)
        for size, each in jobs["duration"].groupby(pooled)
    }
    return {
        "quantiles_s": laws,
        "from": "subset",
        "source": SUBSET + "; 64 and 128 GPUs pooled, few points where few jobs",
    }


def checked(jobs: pd.DataFrame) -> dict[str, Any]:
    """What drawn jobs are compared with; quantiles of run times by class of size, those that enough jobs lie beyond."""
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
        "from": "subset",
        "source": SUBSET,
    }


def main(folder: Path) -> None:
    jobs = rows(folder)
    nodes = pd.read_csv(folder / "philly_vc_nodes.csv", dtype={"vc": str}).set_index("vc")["node num"]
    block = {
        "title": "Philly (Jeon et al., ATC'19)",
        "source": SUBSET,
        "cluster": CLUSTER,
        "arrivals": arrivals(jobs),
        "sizes": sizes(jobs),
        "virtual_clusters": virtual_clusters(jobs, nodes),
        "durations": durations(jobs),
        "batches": BATCHES,
        "users": USERS,
        "end_states": END_STATES,
        "checked": checked(jobs),
        "elsewhere": ELSEWHERE,
    }
    whole = {"synergy_trace_statistics": 1, "sources": SOURCES, "shared": {}, "generators": {"philly": block}}
    print(json.dumps(whole, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    np.seterr(all="raise")
    main(Path(sys.argv[1]))
