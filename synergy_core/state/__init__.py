"""What policies see: of one job its view, of all active jobs columns; nothing that no annotation declares."""

from synergy_core.state.cluster_state import Allocations, ClusterState, EstimatedClusterState, OracleClusterState
from synergy_core.state.views import EstimatedJobView, JobView, OracleJobView, PredictedJobView, PriorityJobView

__all__ = [
    "Allocations",
    "ClusterState",
    "EstimatedClusterState",
    "EstimatedJobView",
    "JobView",
    "OracleClusterState",
    "OracleJobView",
    "PredictedJobView",
    "PriorityJobView",
]
