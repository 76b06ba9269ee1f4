"""What a person types: a file per command, found by being there, with `main(arguments) -> exit code or None`.

`TRAINS = True` in it says that it needs what training needs. What only asks a controller is in `_asking.py`.
"""
