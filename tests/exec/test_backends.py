"""What every backend is, whoever adds it."""

from __future__ import annotations

import importlib
import inspect
import typing

import pytest

from synergy_core.errors import InputError
from synergy_exec.backends import Backend, backend_names, get_backend


@pytest.mark.parametrize("name", backend_names())
def test_backend_says_its_options_and_is_what_the_controller_asks_for(name: str) -> None:
    make = importlib.import_module(f"synergy_exec.backends.{name}").backend
    options = inspect.signature(make).parameters.values()
    assert all(each.default is not each.empty for each in options), "backend.options={} is the default"
    assert all(f"{each.name}:" in inspect.getdoc(make) for each in options)
    made = typing.get_type_hints(make)["return"]
    if made is not Backend:
        wanted = {each for each in vars(Backend) if not each.startswith("_")} - {"nodes"}
        assert wanted <= set(dir(made))
        assert inspect.iscoroutinefunction(made.start)
        assert inspect.iscoroutinefunction(made.stop)
    with pytest.raises(InputError, match=f"unknown option of backend {name} 'none_such'"):
        get_backend(name, {"none_such": 1})
