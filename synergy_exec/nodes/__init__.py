"""The controller's and the profiler's side of agents: their connections, and the runs on their nodes."""
