"""The programs of `python -m synergy_core`: one module a command."""
