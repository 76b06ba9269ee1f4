"""Most tests of reports are of the page; drawing the pictures beside it takes most of the time."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def unpictured(monkeypatch):
    """Pictures are empty files."""
    monkeypatch.setattr(Figure, "savefig", lambda _, path, **__: Path(path).touch())
