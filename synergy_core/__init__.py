"""Scheduling decisions: which jobs run where. This package uses no clock, no simulator, no device, and no files but its
catalog."""

import importlib
import pkgutil
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

try:
    __version__ = version("synergy-cluster")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0+checkout"


def module_names(package: str) -> list[str]:
    """Sorted names of a package's modules, without those that begin with an underscore. Each is a plug-in, and needs no
    other registration. package: the package's full name.
    """
    folder = importlib.import_module(package).__path__
    return sorted(each.name for each in pkgutil.iter_modules(folder) if not each.name.startswith("_"))


def modules_of(package: str) -> list[ModuleType]:
    """Imports the modules that `module_names` lists, in that order."""
    return [importlib.import_module(f"{package}.{name}") for name in module_names(package)]
