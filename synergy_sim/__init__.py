"""A trace-driven discrete-event simulator of a GPU cluster, driving the decisions of `synergy_core`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("synergy-cluster")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0+checkout"
