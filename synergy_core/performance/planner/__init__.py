"""The parallelism planner: finds the fastest parallel plan of a model on given GPUs. Formulas: docs/planner.md."""
