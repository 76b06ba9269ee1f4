"""The subcommands: each file here is one, with `main(arguments) -> exit code or None`.

`TRAINS = True` in a file says that it needs the packages for training. Requests to a controller are in `_asking.py`.
"""
