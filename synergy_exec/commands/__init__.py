"""The subcommands: each file here is one, with `main(arguments) -> exit code or None`.

Requests to a controller are in `_asking.py`.
"""
