"""What only a machine with a GPU can show: whose memory is taken, by whom, and what happens when there is none left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from conftest import StackFactory
from load import Load
from packhorse_shared.devices import find_devices
from questions import learn, random_questions
from reports.asking import ask, wait_idle
from stack import Stack

GPUS = [word for word in find_devices(("auto",), {}).words if word != "cpu"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPUS, reason="no CUDA device on this machine"),
]

MIB = 1 << 20
LEFT_BYTES = 200 * MIB
"""What the process that holds the memory leaves to the server: not enough for a batch of 64 long inputs."""
HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
LONG = "t10 " * 510


@pytest.fixture
def card() -> Iterator[Any]:
    """The first GPU, as NVML knows it."""
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


@contextmanager
def all_memory_taken() -> Iterator[None]:
    """Another process holds all memory of the GPU but a little."""
    command = [sys.executable, "-c", HOLD, str(LEFT_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.kill()


def test_a_card_named_by_its_uuid(make_stack: StackFactory, t_model: Path, card: Any) -> None:
    """A UUID in CUDA_VISIBLE_DEVICES is read as a number, and the start ends there."""
    uuid = pynvml.nvmlDeviceGetUUID(card)
    stack = make_stack(model=t_model, environment={"CUDA_VISIBLE_DEVICES": uuid}).start().wait_ready()
    assert [worker["device"] for worker in stack.workers("ready", "busy")] == [uuid]
    assert ask(stack, {"input": "t10"}).status_code == 200


def test_a_server_for_the_cpu_leaves_the_card_alone(make_stack: StackFactory, t_model: Path, card: Any) -> None:
    """A context on the GPU for a model that runs on the CPU, and an end when that one is full."""
    before = running_on(card)
    stack = make_stack("--devices=cpu", model=t_model).start().wait_ready()
    assert ask(stack, {"input": "t10"}).status_code == 200
    pids = {process.pid for process in stack.processes()}
    assert not pids & running_on(card)
    assert len(running_on(card)) <= len(before), "in a container the pids differ, so they are counted too"
    for worker in stack.processes("worker"):
        assert not any("libcuda.so" in region.path for region in worker.memory_maps())


def running_on(card: Any) -> set[int]:
    return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)}


def test_a_batch_beyond_the_memory_is_split_or_refused(make_stack: StackFactory, slow_model: Path) -> None:
    """Out of memory leaves the service hung, or the process with a context that nothing runs on any more."""
    stack = make_stack("--max_batch_size=64", f"--max_num_tokens={64 * 512}", "--devices=0", model=slow_model)
    stack.start().wait_ready()
    pid = stack.workers("ready", "busy")[0]["pid"]
    with all_memory_taken():
        answer = ask(stack, {"input": [LONG] * 64, "encoding_format": "base64"})
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
        assert ask(stack, {"input": "t10"}).status_code == 200
        assert stack.http.get("/health").status_code == 200
    assert [worker["pid"] for worker in stack.workers("ready", "busy")] == [pid]
    assert len(ask(stack, {"input": [LONG] * 64, "encoding_format": "base64"}).json()["data"]) == 64


def test_the_largest_batch_sets_the_peak_of_memory(make_stack: StackFactory, slow_model: Path, soak: bool) -> None:
    """After one very large batch memory stays high and in pieces, until a batch that used to fit no longer does."""
    stack = make_stack("--max_batch_size=64", f"--max_num_tokens={64 * 512}", "--devices=0", model=slow_model)
    stack.start().wait_ready()
    assert ask(stack, {"input": [LONG] * 64, "encoding_format": "base64"}).status_code == 200
    peak = reserved(stack)
    shapes = [(count, longest) for count in (1, 3, 16, 64) for longest in (1, 20, 200, 510)]
    questions = learn(stack.url, [random_questions(7, 1, inputs=count, longest=longest)[0] for count, longest in shapes], 0.05)
    requests = 10_000 if soak else 1_000
    with Load(stack.port, questions, clients=16, at_most=requests, seed=7) as load:
        assert dict(load.wait_done(within_s=500).counts) == {200: requests}
    wait_idle(stack)
    assert reserved(stack) <= 1.1 * peak


def reserved(stack: Stack) -> int:
    """Bytes that the worker's allocator holds."""
    return int(stack.workers("ready", "busy")[0]["memory_bytes"])
