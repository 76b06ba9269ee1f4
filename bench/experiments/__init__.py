"""Declared experiments: each module assigns `Experiment`s to names, and a page shows them in blocks of these names."""
