"""What several tests of the processes' edges stand on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from packhorse_shared.run_dir import RunDir


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    """An empty one with a short path: a Unix socket's has room for 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ph-") as path:
        yield RunDir(Path(path))
