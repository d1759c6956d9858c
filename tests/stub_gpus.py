"""Machines with GPUs that are none: environments in which the driver lists what a test says (``stub_driver/pynvml.py``)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "stub_driver"
NO_DRIVER, NOT_LOADED, MISMATCH, NO_PERMISSION, UNKNOWN = 12, 9, 18, 4, 999
"""Errors of NVML."""


def cards(*uuids: str) -> dict[str, Any]:
    """A machine with these plain cards."""
    return {"cards": [{"uuid": uuid} for uuid in uuids]}


def driver_environment(machine: dict[str, Any]) -> dict[str, str]:
    """For a process: variables under which it finds this machine."""
    return {"PYTHONPATH": str(FOLDER), "STUB_GPUS": json.dumps(machine)}


def load() -> ModuleType:
    """The stub in place of pynvml."""
    spec = importlib.util.spec_from_file_location("pynvml", FOLDER / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretend(monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any]) -> None:
    """For the test's own process."""
    monkeypatch.setitem(sys.modules, "pynvml", load())
    monkeypatch.setenv("STUB_GPUS", json.dumps(machine))
