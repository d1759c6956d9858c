"""How fast the broker is, without a model: ``python benchmarks/broker.py`` prints one table, in under a minute.

- bare core: events in, actions out, in this process;
- loop: a broker process with two stub workers that answer at once, fed by one frontend over real ipc sockets;
- latency: what one lone request spends between a frontend's send and its answer, stub worker included.

The frontend and the stubs share the cores with the broker, so the loop's figures are also given per second of the broker's
own processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import zmq
from rich.console import Console
from rich.table import Table

from packhorse_broker import events as e
from packhorse_broker.core import BrokerCore
from packhorse_shared import messages as m
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import BatchingSettings, Settings
from packhorse_shared.sockets import new_identity, open_dealer

TOKENS = 16
VALUES = 384
BATCH = 32
TOKEN = "t" * 64
MODEL = m.ModelFacts(
    name="stub",
    task="embedding",
    dimension=VALUES,
    max_seq_len=512,
    dtype="float32",
    vocabulary_rows=1000,
    canary=(2, 3),
    fingerprint="s",
)
LIMITS = m.WorkerLimits(max_batch_size=BATCH, max_num_tokens=8192)
ROW = array("f", [0.5] * VALUES).tobytes()


def bare_core(inputs_per_request: int, seconds: float) -> float:
    """Inputs per second of processor time through the core alone: two workers that answer at once, payloads cut, not joined."""
    settings = Settings(batching=BatchingSettings(max_queue_delay=0.0, max_queue_size=1_000_000))
    core = BrokerCore(settings, boot_id=1, worker_token=TOKEN, now=0.0)
    core.handle(e.FrontendGreeted(b"f", m.FrontendHello(m.PROTOCOL_VERSION, 0, 0)), 0.0)
    for worker in (b"w0", b"w1"):
        hello = m.WorkerHello(m.PROTOCOL_VERSION, TOKEN, 0, 0, 1, "cpu", MODEL, LIMITS)
        for action in core.handle(e.WorkerGreeted(worker, hello), 0.0):
            if isinstance(action, e.SendBatch):  # the canary
                done = m.Done(1, action.work.batch_id, [VALUES], [], 1.0)
                core.handle(e.BatchFinished(worker, done, ROW), 0.0)
    requests_per_message = max(1, 64 // inputs_per_request)
    payload = b"\0" * (4 * TOKENS * inputs_per_request * requests_per_message)
    rows = ROW * BATCH
    rid = answered = 0
    began = time.process_time()
    while (now := time.process_time() - began) < seconds:
        requests = [m.SubmittedRequest(rid + i, [TOKENS] * inputs_per_request, 60_000) for i in range(requests_per_message)]
        rid += requests_per_message
        core.handle(e.RequestsSubmitted(b"f", requests, payload), now)
        actions = core.handle(e.TimePassed(), now)
        while batches := [action for action in actions if isinstance(action, e.SendBatch)]:
            for batch in batches:
                size = len(batch.work.lengths)
                done = m.Done(1, batch.work.batch_id, [VALUES] * size, [], 1.0)
                core.handle(e.BatchFinished(batch.worker, done, memoryview(rows)[: 4 * VALUES * size]), now)
                answered += size
            actions = core.handle(e.TimePassed(), now)
            core.next_deadline()
    assert answered, "the core refused its workers or its requests"
    return answered / (time.process_time() - began)


def stub_worker(path: str, slot: int) -> None:
    """Answers every batch at once with rows that were made before."""
    run_dir = RunDir(Path(path))
    socket = open_dealer(zmq.Context(), run_dir.workers_endpoint, new_identity("worker", slot))
    hello = m.WorkerHello(m.PROTOCOL_VERSION, run_dir.token(), slot, 0, slot + 1, "stub", MODEL, LIMITS)
    socket.send_multipart(encode(hello))
    decoder, rows = Decoder(m.Join, m.Work, m.Drain, m.Introduce), memoryview(ROW * BATCH)
    while True:
        if not socket.poll(250):
            socket.send_multipart(encode(m.Beat(0, 0.0, 0)))
            continue
        work, _ = decoder.decode(socket.recv_multipart())
        if isinstance(work, m.Work):
            size = len(work.lengths)
            done = m.Done(work.boot_id, work.batch_id, [VALUES] * size, [], 0.1)
            socket.send_multipart(encode(done, rows[: 4 * VALUES * size]))
        elif isinstance(work, m.Drain):
            return


class Client:
    """A frontend's socket and the numbering of its requests."""

    def __init__(self, run_dir: RunDir) -> None:
        self.socket = open_dealer(zmq.Context.instance(), run_dir.frontends_endpoint, new_identity("frontend", 0))
        self._decoder = Decoder(m.BrokerState, m.Result, m.RequestFailure, m.Introduce)
        self._rid = 0
        self.socket.send_multipart(encode(m.FrontendHello(m.PROTOCOL_VERSION, 0, 0)))

    def wait_ready(self, workers: int) -> None:
        """Until so many workers joined."""
        while True:
            message, _ = self._decoder.decode(self.socket.recv_multipart())
            if isinstance(message, m.BrokerState) and message.ready_workers == workers:
                return

    def submit(self, requests: int, inputs: int) -> None:
        """One message with so many requests of so many inputs."""
        submitted = [m.SubmittedRequest(self._rid + i, [TOKENS] * inputs, 60_000) for i in range(requests)]
        self._rid += requests
        self.socket.send_multipart(encode(m.Submit(submitted), b"\0" * (4 * TOKENS * inputs * requests)))

    def receive(self) -> int:
        """Rows of the next result."""
        message, _ = self._decoder.decode(self.socket.recv_multipart())
        assert not isinstance(message, m.RequestFailure), message
        return sum(len(each.indexes) for each in message.requests) if isinstance(message, m.Result) else 0


@contextmanager
def running_broker(*flags: str) -> Iterator[tuple[RunDir, psutil.Process]]:
    """A broker process with two stub workers."""
    with tempfile.TemporaryDirectory(prefix="ph-") as folder:
        run_dir = RunDir(Path(folder))
        command = [sys.executable, "-m", "packhorse_broker", "--run_dir", folder, "--log_level", "error", *flags]
        broker = subprocess.Popen(command)
        while not run_dir.server_file.exists():
            time.sleep(0.01)
        spawn = multiprocessing.get_context("spawn")
        stubs = [spawn.Process(target=stub_worker, args=(folder, slot), daemon=True) for slot in range(2)]
        for stub in stubs:
            stub.start()
        try:
            yield run_dir, psutil.Process(broker.pid)
        finally:
            broker.terminate()
            broker.wait(10)
            for stub in stubs:
                stub.join(5)
                stub.kill()


def cpu_s(process: psutil.Process) -> float:
    """Processor time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def throughput(client: Client, broker: psutil.Process, requests: int, inputs: int, seconds: float) -> tuple[float, float]:
    """Inputs per second, and per second of the broker's processor time, with about 2,000 inputs under way."""
    under_way = answered = 0
    before, began = cpu_s(broker), time.perf_counter()
    while time.perf_counter() - began < seconds or under_way:
        while under_way < 2000 and time.perf_counter() - began < seconds:
            client.submit(requests, inputs)
            under_way += requests * inputs
        rows = client.receive()
        under_way -= rows
        answered += rows
    return answered / (time.perf_counter() - began), answered / max(cpu_s(broker) - before, 0.01)


def lone_latencies_ms(client: Client, count: int) -> list[float]:
    """Round trips of single requests on an idle server, sorted."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        client.submit(1, 1)
        while not client.receive():
            pass
        found.append(1000 * (time.perf_counter() - began))
    return sorted(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each measurement takes (default 5)")
    seconds = parser.parse_args().seconds
    table = Table(title="packhorse broker, 16 tokens and 384 values per input, batches of 32")
    for heading in ("what", "result"):
        table.add_column(heading)
    shapes: list[tuple[str, int, int]] = [("requests of 1 input", 16, 1), ("requests of 64 inputs", 1, 64)]
    for name, _, inputs in shapes:
        table.add_row(f"bare core, {name}", f"{bare_core(inputs, seconds):,.0f} inputs/s")
    with running_broker("--max_queue_delay", "0", "--max_queue_size", "100000") as (run_dir, broker):
        client = Client(run_dir)
        client.wait_ready(2)
        lone_latencies_ms(client, 200)
        latencies = lone_latencies_ms(client, max(200, round(400 * seconds)))
        for name, requests, inputs in shapes:
            per_s, per_cpu_s = throughput(client, broker, requests, inputs, seconds)
            table.add_row(f"loop, 2 stub workers, {name}", f"{per_s:,.0f} inputs/s, {per_cpu_s:,.0f} per second of its core")
        p50, p99 = statistics.median(latencies), latencies[int(0.99 * len(latencies))]
        table.add_row("lone request, round trip with stub worker", f"p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
