"""The core's own commands: one module each, with `SUMMARY`, `add_arguments(parser)` and `run(chosen) -> exit status`.

Adding a module to this folder registers its command.
"""
