"""Which devices and how many cores a server takes. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StackFactory
from harm import logged
from packhorse_shared.settings import ModelSettings, Settings, WorkerSettings
from packhorse_worker.__main__ import _place
from reports.asking import ask

LOAD = """
import os, sys
from packhorse_shared.settings import ModelSettings, Settings, WorkerSettings
from packhorse_worker.__main__ import _load, _place
settings = Settings(model=ModelSettings(model=sys.argv[1]), workers=WorkerSettings(devices=(sys.argv[2],)))
try:
    _load(settings, _place(settings, None, int(sys.argv[3]), os.environ))
except Exception as problem:
    print(problem)
import torch
print(repr(os.environ["CUDA_VISIBLE_DEVICES"]), torch.cuda.is_initialized())
"""
"""Loads a model as a worker does, and says what it let torch see."""


def loaded(model: Path, devices: str, slot: int, visible: str) -> str:
    shown = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), devices, str(slot)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return shown.stdout


def test_devices_are_words_and_each_worker_has_one(t_model: Path) -> None:
    """UUIDs of devices read as numbers end the start; or each worker sees all devices, and all of them take the first."""
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}
    settings = Settings(model=ModelSettings(model="/models/a"), workers=WorkerSettings())
    assert [_place(settings, None, slot, visible).device for slot in (0, 1)] == ["GPU-aaaa", "GPU-bbbb"]
    shown = loaded(t_model, "auto", 1, visible["CUDA_VISIBLE_DEVICES"])
    assert shown.splitlines()[-1] == "'GPU-bbbb' False"


def test_a_cpu_worker_sees_no_gpu(t_model: Path) -> None:
    """A server for the CPU makes a context on the GPU all the same, and ends when that one is full."""
    assert loaded(t_model, "cpu", 0, "GPU-aaaa").splitlines() == ["'' False"]


@pytest.mark.process
def test_threads_follow_the_cores_that_may_be_used(make_stack: StackFactory, t_model: Path) -> None:
    """Threads for every core of the host in a container of two: several times slower than with as many as it has."""
    core = str(min(os.sched_getaffinity(0)))
    stack = make_stack("--log_level=debug", model=t_model)
    stack.command = ["taskset", "-c", core, *stack.command]
    stack.start().wait_ready()
    assert logged(stack, r" ready .*threads=(\d+)", "worker-0") == ["1"]
    assert logged(stack, r"listening .*threads=(\d+)", "frontend-0") == ["1"]
    for worker in stack.processes("worker"):
        assert worker.cpu_affinity() == [int(core)]
    assert ask(stack, {"input": "t10"}).status_code == 200
