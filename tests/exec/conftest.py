"""Programs of the executor start as forks of one process (`warm.py`), which is forked before the first test runs."""

import subprocess

import pytest
from exec import warm


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtestloop():
    warm.prepare()
    yield


@pytest.fixture
def warm_agents(monkeypatch):
    """A backend in this process starts its agents as such forks."""
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
