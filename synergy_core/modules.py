"""One thing, one file: being in a package's folder registers it. What begins with an underscore is not one of them."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def module_names(package: str) -> list[str]:
    """The names of the modules in a package's folder, sorted. package: its full name."""
    folder = importlib.import_module(package).__path__
    return sorted(each.name for each in pkgutil.iter_modules(folder) if not each.name.startswith("_"))


def modules_of(package: str) -> list[ModuleType]:
    """The modules themselves, imported in the order of their names."""
    return [importlib.import_module(f"{package}.{name}") for name in module_names(package)]
