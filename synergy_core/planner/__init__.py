"""The parallelism planner: which parallel plan trains a model fastest on given GPUs, how long a step takes, what fits.

docs/planner.md has the shape of it and the formulas.
"""
