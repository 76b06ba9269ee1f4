"""The core's own commands: one module each, with `SUMMARY`, `add_arguments(parser)` and `run(chosen) -> exit status`.

Being in the folder registers one. A module imports what computes inside `run`, so that `--help` stays fast.
"""
