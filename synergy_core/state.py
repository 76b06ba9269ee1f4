"""The names that a policy file imports: views of a job and of all active jobs, and an allocation policy's answer."""

from synergy_core.jobs.state import (
    Allocations,
    ClusterState,
    EstimatedClusterState,
    EstimatedJobView,
    GoodputState,
    JobView,
    OracleClusterState,
    OracleGoodputState,
    OracleJobView,
    PredictedClusterState,
    PredictedJobView,
    PriorityClusterState,
    PriorityJobView,
    Room,
    ShareLevels,
)

__all__ = [
    "Allocations",
    "ClusterState",
    "EstimatedClusterState",
    "EstimatedJobView",
    "GoodputState",
    "JobView",
    "OracleClusterState",
    "OracleGoodputState",
    "OracleJobView",
    "PredictedClusterState",
    "PredictedJobView",
    "PriorityClusterState",
    "PriorityJobView",
    "Room",
    "ShareLevels",
]
