"""Programs of the executor start as forks of one process (`warm.py`), which is forked before the first test runs."""

from exec import warm
import pytest


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtestloop():
    warm.prepare()
    yield
