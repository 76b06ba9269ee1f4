"""The decisions: what should run where. Knows no clock, no file but its catalog, no simulator and no device."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("synergy-cluster")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0+checkout"
