"""A whole server under ``packhorse bench``, for ``gpu.py``: how frontends, and workers on one card, add up.

All servers are started at once and loaded in turn, so that what is compared is measured in alternating slices; those that wait
their turn do nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pynvml
import yaml
from gpu_models import LONGEST, BuiltModel, text_maker
from gpu_report import figure
from gpu_run import LENGTHS, lengths_of
from gpu_systems import graph_sizes

from packhorse_shared.devices import CPU, find_devices
from stack import Stack

_READY_WITHIN_S = 150.0
_GRAPH_BATCHES = ((8, 50), (32, 50), (64, 50), (8, 512))
_TEXTS_IN_FILE = 512


@dataclass(frozen=True)
class Setup:
    """One server."""

    frontends: int
    workers: int
    """On one device."""
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.frontends} frontend(s), {self.workers} worker(s), {'graphs' if self.graphs else 'eager'}"


@dataclass(frozen=True)
class Load:
    """One kind of traffic."""

    tokens: int
    inputs: int
    """In a request."""
    clients: int

    @property
    def name(self) -> str:
        return f"{self.clients} clients, {self.inputs} x {self.tokens} tokens a request"


@dataclass
class Served:
    """The slices of one server under one load."""

    setup: Setup
    load: Load
    slices: list[dict[str, float]] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """Over slices: rates add up the load generators of one, latencies are the worst of them."""
        keys = [key for key in self.slices[0] if all(key in each for each in self.slices)]
        figures = {key: figure([each[key] for each in self.slices]) for key in keys}
        setup = {"frontends": self.setup.frontends, "workers": self.setup.workers, "graphs": self.setup.graphs}
        return {**setup, "tokens": self.load.tokens, "inputs": self.load.inputs, "clients": self.load.clients, **figures}


def setups_of(*, quick: bool) -> list[Setup]:
    if quick:
        return [Setup(1, 1, graphs=True), Setup(2, 2, graphs=False)]
    several = [Setup(4, workers, graphs=True) for workers in (1, 2, 4)]
    return [Setup(1, 1, graphs=False), Setup(1, 1, graphs=True), *several]


def loads_of(*, quick: bool) -> list[Load]:
    short, long = lengths_of(quick=quick)
    if quick:
        return [Load(short, 1, 2), Load(long, 2, 2)]
    return [Load(short, 1, 1), Load(short, 1, 128), Load(short, 32, 32), Load(long, 8, 32)]


@dataclass
class Options:
    """How it is measured."""

    device: str
    quick: bool
    ends_at: float
    """By ``time.monotonic()``; no round begins after it."""
    rounds: int
    generators: int
    """Load generators at a time, a process each: one of them is no match for several frontends."""
    slice_s: float


def measure(model: BuiltModel, into: Path, options: Options, problem: Callable[[str, BaseException], None]) -> dict[str, Any]:
    """Start the servers, load them in turn. ``problem`` is told what failed; the rest goes on."""
    files = {tokens: texts_file(model, into, tokens) for tokens in lengths_of(quick=options.quick)}
    with started(model, into, options, problem) as (stacks, starts):
        slices = [Served(setup, load) for load in loads_of(quick=options.quick) for setup in stacks]
        for number in range(options.rounds):
            if number and time.monotonic() > options.ends_at:
                break
            for place in range(len(slices)):
                each = slices[(place + number) % len(slices)]
                try:
                    each.slices.append(loaded(stacks[each.setup].url, files[each.load.tokens], each.load, options))
                except Exception as error:
                    problem(f"{each.setup.name}, {each.load.name}", error)
            print(f"served: round {number + 1}", file=sys.stderr, flush=True)
        return {"model": model.title, "starts": starts, "loads": [each.told() for each in slices if each.slices]}


@contextmanager
def started(
    model: BuiltModel, into: Path, options: Options, problem: Callable[[str, BaseException], None]
) -> Iterator[tuple[dict[Setup, Stack], list[dict[str, Any]]]]:
    """The servers that became ready, and how long each took while all of them started at once."""
    stacks: dict[Setup, Stack] = {}
    ready: dict[Setup, Stack] = {}
    starts: list[dict[str, Any]] = []
    try:
        for setup in setups_of(quick=options.quick):
            stacks[setup] = Stack(*flags(setup, into, options), model=model.folder)
            stacks[setup].start()
        began = time.monotonic()
        for setup, stack in stacks.items():
            try:
                wait_ready(stack, setup.workers, began + _READY_WITHIN_S)
                ready[setup] = stack
                starts.append({"setup": setup.name, "seconds": time.monotonic() - began})
            except Exception as error:
                problem(f"start of a server: {setup.name}", error)
        yield ready, starts
    finally:
        for stack in stacks.values():
            with suppress(Exception):
                stack.terminate()
        for stack in stacks.values():
            with suppress(Exception):
                stack.wait_stopped()
            stack.clean()


def flags(setup: Setup, into: Path, options: Options) -> list[str]:
    """Flags of ``packhorse embeddings``."""
    device = CPU if options.device == CPU else find_devices(("auto",), os.environ).words[0]
    found = [f"--num_frontends={setup.frontends}", f"--workers_per_device={setup.workers}", f"--devices={device}"]
    found += [f"--max_seq_len={LONGEST}", "--max_batch_size=64", "--max_queue_size=100000"]
    if setup.graphs:
        config = into / "graphs.yaml"
        sizes = graph_sizes(LENGTHS, _GRAPH_BATCHES)
        config.write_text(yaml.safe_dump({"cuda_graph_config": sizes}), encoding="utf-8")
        found.append(f"--config={config}")
    return found


def wait_ready(stack: Stack, workers: int, ends_at: float) -> None:
    """Raises RuntimeError with the end of the server's output when it ends, or is not ready in time."""
    while True:
        assert stack.process is not None
        status = stack.process.poll()
        with suppress(httpx.TransportError, AssertionError):
            if len(stack.workers("ready", "busy")) >= workers:
                return
        if status is not None or time.monotonic() > ends_at:
            what = "not ready in time" if status is None else f"ended with {status}"
            raise RuntimeError(f"{what}: {stack.text()[-2000:]}")
        time.sleep(0.2)


def texts_file(model: BuiltModel, into: Path, tokens: int) -> Path:
    """For ``packhorse bench --texts``."""
    path = into / f"texts-{tokens}.jsonl"
    lines = [json.dumps(each) for each in text_maker(model.folder)(tokens, _TEXTS_IN_FILE, 9)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def loaded(url: str, texts: Path, load: Load, options: Options) -> dict[str, float]:
    """One slice: several load generators at once, which share the clients."""
    count = min(options.generators, load.clients)
    each = load.clients // count
    command = [sys.executable, "-m", "packhorse", "bench", url, f"--texts={texts}", f"--inputs={load.inputs}"]
    command += [f"--concurrency={each}", f"--duration={options.slice_s}", f"--warmup={options.slice_s / 4}"]
    command += ["--encoding_format=base64", "--json=-"]
    busy = Busy() if options.device != "cpu" else None
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        outputs = [child.communicate(timeout=options.slice_s + 60) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
        share = None if busy is None else busy.stop()
    for child, (_, complaints) in zip(children, outputs, strict=True):
        if child.returncode:
            raise RuntimeError(f"packhorse bench ended with {child.returncode}: {complaints.strip()[-500:]}")
    found = slice_of([json.loads(output)["servers"][0] for output, _ in outputs])
    return found if share is None else {**found, "gpu_busy_share": share}


def slice_of(servers: list[dict[str, Any]]) -> dict[str, float]:
    """The reports of load generators that ran at the same time as one."""
    totals = [each["total"] for each in servers]
    refused = sum(each["refused"] + each["failed"] for each in totals)
    if refused:
        raise RuntimeError(f"{refused} requests were refused or failed: {servers[0]['failures'] or servers[0]['refusal']}")
    return {
        "texts_per_s": sum(each["inputs_per_s"] for each in totals),
        "tokens_per_s": sum(each["tokens_per_s"] or 0.0 for each in totals),
        "p50_ms": max(each["latency_ms"]["p50"] for each in totals),
        "p99_ms": max(each["latency_ms"]["p99"] for each in totals),
        "client_cpu_share": max(each["client"]["cpu_share"] for each in servers),
    }


class Busy:
    """Samples the share of time in which the card ran any kernel; None where NVML does not tell."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._over.wait(0.2):
                self._samples.append(pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100)

    def stop(self) -> float | None:
        """The median so far."""
        self._over.set()
        self._thread.join(5)
        return sorted(self._samples)[len(self._samples) // 2] if self._samples else None
