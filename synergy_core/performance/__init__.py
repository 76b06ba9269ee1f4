"""How fast a job trains: speed models and goodput, the catalog, and the planner of parallel training."""
