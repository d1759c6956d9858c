"""Which devices and how many cores a server takes. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StackFactory
from harm import logged
from reports.asking import ask
from stub_gpus import NO_DRIVER, driver_environment

LOAD = """
import os, sys
import packhorse_worker.__main__ as worker

load = worker._load

def loaded(settings, place):
    try:
        load(settings, place)
    except Exception as problem:
        print(problem)
    import torch
    print(repr(os.environ["CUDA_VISIBLE_DEVICES"]), torch.cuda.is_initialized(), flush=True)
    os._exit(0)

worker._load = loaded
worker.main(sys.argv[1:])
"""
"""A worker that loads its model, says what it let torch see, and ends."""


def loaded(model: Path, devices: str, slot: int, visible: str, run_dir: Path) -> str:
    shown = subprocess.run(
        [sys.executable, "-c", LOAD, f"--model={model}", f"--devices={devices}", f"--slot={slot}", f"--run_dir={run_dir}"],
        env=os.environ | driver_environment({"error": NO_DRIVER}) | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return shown.stdout


def test_devices_are_words_and_each_worker_has_one(t_model: Path, tmp_path: Path) -> None:
    """UUIDs of devices read as numbers end the start; or each worker sees all devices, and all of them take the first."""
    for slot, word in enumerate(("GPU-aaaa", "GPU-bbbb")):
        shown = loaded(t_model, "auto", slot, "GPU-aaaa,GPU-bbbb", tmp_path / "run").splitlines()
        assert shown[0].startswith("devices: ")
        assert word in shown[0]
        assert shown[-1] == f"'{word}' False"


def test_a_cpu_worker_sees_no_gpu(t_model: Path, tmp_path: Path) -> None:
    """A server for the CPU makes a context on the GPU all the same, and ends when that one is full."""
    assert loaded(t_model, "cpu", 0, "GPU-aaaa", tmp_path / "run").splitlines() == ["'' False"]


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
