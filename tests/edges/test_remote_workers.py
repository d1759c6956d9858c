"""Workers of other machines at the broker's door: real sockets on loopback, real CURVE, fake workers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from broker_process import Broker
from fakes import CANARY_ROW, LIMITS, MODEL, FakeFrontend, FakeWorker, Row, encode_batch, vector_of
from packhorse_shared import messages as m
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.connection import Connection, open_monitor, read_connection
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError
from packhorse_shared.key_folders import WorkerKeys, make_keys, read_broker_keys, read_worker_keys
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings_query import query_settings
from packhorse_shared.sockets import new_identity, open_dealer, open_tcp_router
from packhorse_worker.meeting import RemoteBroker
from stack import free_port
from tcp_proxy import TcpProxy
from waiting import wait_until
from worker_thread import RunningWorker


class Place:
    """A run directory, keys for two machines, and a port."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self.keys = path / "keys"
        make_keys(self.keys, ["gpu1", "gpu2"])
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def keys_of(self, name: str) -> WorkerKeys:
        return read_worker_keys(self.keys / name)

    def remote(self, name: str = "gpu1", **changes: Any) -> RemoteBroker:
        """Where a machine's workers meet the broker; ``changes`` to its keys."""
        return RemoteBroker(self.endpoint, dataclasses.replace(self.keys_of(name), **changes))

    @property
    def allowed(self) -> Path:
        return self.keys / "broker" / "allowed"


@pytest.fixture
def place() -> Iterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="ph-"))
    yield Place(path)
    shutil.rmtree(path)


@pytest.fixture
def run_dir(place: Place) -> RunDir:
    return place.run_dir


StartBroker = Callable[..., Broker]


@pytest.fixture
def start(place: Place) -> Iterator[StartBroker]:
    """Starts brokers that also take workers of other machines."""
    started: list[Broker] = []

    def begin(*flags: str) -> Broker:
        listen = (f"--broker={place.endpoint}", f"--curve_keys={place.keys / 'broker'}")
        started.append(Broker(place.run_dir, *listen, *flags))
        return started[-1].wait_listening()

    yield begin
    for each in started:
        each.end()


def workers(frontend: FakeFrontend) -> dict[str, str]:
    return {each.id: each.state for each in frontend.status().workers}


def test_a_round_trip_beside_a_worker_of_this_machine(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    start("--max_batch_size=1")
    with (
        FakeFrontend(run_dir) as frontend,
        FakeWorker(place.remote(), slot=-1, pid=7) as remote,
        FakeWorker(place.remote("gpu2"), slot=-1, pid=7),
        FakeWorker(run_dir, slot=0) as local,
    ):
        frontend.submit(1, [[index + 1] * 3 for index in range(40)])
        assert frontend.wait(1) == [vector_of([index + 1] * 3) for index in range(40)]
        assert remote.batches
        assert local.batches
        assert workers(frontend) == {"worker-gpu1-7": "ready", "worker-gpu2-7": "ready", "worker-0": "ready"}


def test_payloads_of_megabytes(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    start("--max_num_tokens", "auto", "--max_batch_size", "64")
    inputs = [[index] * 20_000 for index in range(100)]

    def wide(batch: list[Sequence[int]], _work: m.Work) -> list[Row]:
        return [[float(ids[0])] * 5000 for ids in batch]

    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote(), model=wide):
        frontend.submit(1, inputs)
        assert frontend.wait(1, within_s=30) == [[float(index)] * 5000 for index in range(100)]


def test_settings_are_told_without_secrets_and_as_another_machine_needs_them(start: StartBroker, place: Place) -> None:
    model = place.run_dir.path / "my-model"
    model.mkdir()
    start("--api_key=secret-key", "--max_batch_size=5", f"--model={os.path.relpath(model)}")
    settings = query_settings(place.endpoint, place.keys_of("gpu1"), 10.0)
    assert settings.http.api_key == ()
    assert settings.batching.max_batch_size == 5
    assert settings.model.model is not None
    assert settings.model.model.startswith("/")
    assert Path(settings.model.model).resolve() == model
    assert settings.model.served_model_name == ("my-model",)


# ---- who gets nothing ----


class Stranger:
    """A peer at the broker's door with any key, or none."""

    def __init__(self, endpoint: str, keys: WorkerKeys | None, identity: bytes | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = open_dealer(self._context, endpoint, identity or new_identity("worker", 0), keys)
        self._monitor = open_monitor(self.socket)
        self.seen: set[Connection] = set()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=0)

    def look(self) -> set[Connection]:
        """Every state of the connection so far."""
        while self._monitor.poll(0):
            self.seen.add(read_connection(self._monitor))
        return self.seen

    def introduce(self, token: str = "") -> None:
        hello = m.WorkerAnnounce(m.PROTOCOL_VERSION, token, -1, 1, 1, "cpu")
        for message in (m.SettingsQuery(), hello):
            with contextlib.suppress(zmq.Again):  # refused already, for good
                self.socket.send_multipart(encode(message), zmq.NOBLOCK)


def unlisted(place: Place) -> WorkerKeys:
    public, secret = zmq.curve_keypair()
    return dataclasses.replace(place.keys_of("gpu1"), public=public, secret=secret)


def wrong_server(place: Place) -> WorkerKeys:
    return dataclasses.replace(place.keys_of("gpu1"), broker=zmq.curve_keypair()[0])


def borrowed_public_key(place: Place) -> WorkerKeys:
    """The public keys are no secret: showing one that is allowed does not help."""
    return dataclasses.replace(unlisted(place), public=place.keys_of("gpu1").public)


@pytest.mark.parametrize("make", [unlisted, wrong_server, borrowed_public_key, lambda _: None])
def test_without_the_right_key_nothing_comes_out(
    start: StartBroker, place: Place, run_dir: RunDir, make: Callable[[Place], WorkerKeys | None]
) -> None:
    """Not even with the token of the run directory: no settings, no work, no word."""
    broker = start()
    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote()), Stranger(place.endpoint, make(place)) as stranger:
        stranger.introduce(run_dir.token())
        wait_until(lambda: {Connection.UNPROVEN, Connection.REFUSED} & stranger.look(), 10, "the end of the handshake")
        for rid in range(20):
            frontend.submit(rid, [[4, 4]])
            assert frontend.wait(rid) == [vector_of([4, 4])]
        assert Connection.UP not in stranger.look()
        assert not stranger.socket.poll(200)
        assert list(workers(frontend)) == ["worker-gpu1-0"]
    assert broker.process.poll() is None


def test_who_is_refused_is_told_so_and_logged(start: StartBroker, place: Place) -> None:
    broker = start()
    keys = unlisted(place)
    with pytest.raises(CannotStartError, match=r"curve_keys: tcp://.* does not allow the key of .*gpu1"):
        query_settings(place.endpoint, keys, 10.0)
    wait_until(lambda: "refused a connection: its key is not allowed" in broker.log())
    assert keys.public[:8].decode() in broker.log()
    assert keys.secret.decode() not in broker.log()


def test_another_broker_than_the_right_one_is_not_believed(start: StartBroker, place: Place) -> None:
    start()
    with pytest.raises(CannotStartError, match=r"does not show that .*broker\.key is its key \(tried 1 s\)"):
        query_settings(place.endpoint, wrong_server(place), 1.0)


def test_a_port_where_nobody_listens_or_no_broker(place: Place) -> None:
    with pytest.raises(CannotStartError, match=r"broker: tcp://127.* cannot be reached \(tried 0\.5 s\)"):
        query_settings(place.endpoint, place.keys_of("gpu1"), 0.5)
    with sockets.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(10):  # ZeroMQ may have given the connection up before the question is sent, or after
            with pytest.raises(CannotStartError, match=r"broker: .*\(tried 0\.1 s\)"):
                query_settings(endpoint, place.keys_of("gpu1"), 0.1)
        server.shutdown(sockets.SHUT_RDWR)


def test_a_key_that_is_added_may_join_and_one_that_is_taken_away_must_go(
    start: StartBroker, place: Place, run_dir: RunDir
) -> None:
    broker = start()
    make_keys(place.keys, ["gpu3"])
    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote("gpu2"), slot=-1, pid=2):
        third = FakeWorker(place.remote("gpu3"), slot=-1, pid=3).start()
        assert workers(frontend) == {"worker-gpu2-2": "ready", "worker-gpu3-3": "ready"}
        (place.allowed / "gpu3.key").unlink()
        assert third.is_gone.wait(10)
        assert third.refused == "its key was taken away"
        third.stop()
        assert workers(frontend) == {"worker-gpu2-2": "ready", "worker-gpu3-3": "gone"}
        with pytest.raises(CannotStartError, match="does not allow the key"):
            query_settings(place.endpoint, place.keys_of("gpu3"), 10.0)
        frontend.submit(1, [[4, 4]])
        assert frontend.wait(1) == [vector_of([4, 4])]
    assert "a key may no longer join key=gpu3" in broker.log()


def test_one_who_stays_although_his_key_was_taken_away_gets_nothing(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    broker = start()
    with Stranger(place.endpoint, place.keys_of("gpu1")) as stranger, FakeFrontend(run_dir) as frontend:
        stranger.introduce()
        assert stranger.socket.poll(5000)
        stranger.socket.recv_multipart()
        (place.allowed / "gpu1.key").unlink()

        def is_told() -> bool:
            stranger.socket.send_multipart(encode(m.Beat(0, 0.0, 1)))
            return bool(stranger.socket.poll(50))

        wait_until(is_told, 5)
        assert Decoder(m.Refused).decode(stranger.socket.recv_multipart())[0] == m.Refused("its key was taken away")
        for _ in range(50):
            stranger.introduce()
        frontend.status()
        assert not stranger.socket.poll(300)
    assert broker.log().count("its key was taken away") == 1


# ---- what those with a key may do ----


def test_an_identity_of_one_door_is_not_one_of_the_other(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    """A worker of another machine that takes the identity of a local one, or guesses how the broker tells them apart."""
    start("--max_batch_size=1", "--worker_timeout=2")
    proceed = threading.Event()

    def gated(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        proceed.wait(10)
        return encode_batch(inputs, work)

    local = FakeWorker(run_dir, slot=0, model=gated)
    local.identity = new_identity("worker", 0)
    with FakeFrontend(run_dir) as frontend, local:
        frontend.submit(1, [[8, 8], [9]])
        wait_until(lambda: len(local.batches) == 2)
        for identity in (local.identity, b"w" + local.identity, b"r" + local.identity):
            with Stranger(place.endpoint, place.keys_of("gpu1"), identity) as thief:
                for batch_id in range(5):
                    boot_id = frontend.state.boot_id if frontend.state is not None else 0
                    thief.socket.send_multipart(encode(m.Done(boot_id, batch_id, [3], [], 1.0), b"\0" * 12))
                thief.socket.send_multipart(encode(m.Draining([1, 2])))
                thief.socket.send_multipart(encode(m.Bye("")))
                assert thief.socket.poll(5000)
                assert isinstance(Decoder(m.Introduce).decode(thief.socket.recv_multipart())[0], m.Introduce)
        assert workers(frontend) == {"worker-0": "busy"}
        proceed.set()
        assert frontend.wait(1) == [vector_of([8, 8]), vector_of([9])]
        assert len(local.batches) == 2


def test_malformed_messages_are_counted_and_dropped(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    broker = start()
    seed = 11
    random = Random(seed)
    with (
        FakeFrontend(run_dir) as frontend,
        FakeWorker(place.remote()),
        Stranger(place.endpoint, place.keys_of("gpu2")) as stranger,
    ):
        for _ in range(4000):
            frames = [random.randbytes(random.randrange(40)) for _ in range(random.randrange(1, 6))]
            stranger.socket.send_multipart(frames)
        stranger.socket.send_multipart([b"\x24", b"\x90" * 70_000, b""])
        stranger.socket.send_multipart(encode(m.Ping()))
        stranger.introduce()
        assert stranger.socket.poll(10_000), f"seed {seed}"
        frontend.submit(9, [[4, 4]])
        assert frontend.wait(9) == [vector_of([4, 4])]
    wait_until(lambda: "malformed message dropped" in broker.log())
    assert broker.process.poll() is None


def test_another_version_is_told_so(start: StartBroker, place: Place) -> None:
    start()
    with Stranger(place.endpoint, place.keys_of("gpu1")) as stranger:
        stranger.socket.send_multipart([b"\x21", msgspec.msgpack.encode([m.PROTOCOL_VERSION + 1, "x"]), b""])
        assert stranger.socket.poll(5000)
        refused, _ = Decoder(m.Refused).decode(stranger.socket.recv_multipart())
        assert f"it speaks protocol {m.PROTOCOL_VERSION + 1}" in refused.reason


def test_the_pid_of_another_machine_is_nobody_here(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    """Neither watched nor killed, whoever has it here: the worker is told to end itself."""
    broker = start("--worker_timeout=1")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        with FakeFrontend(run_dir) as frontend:
            worker = FakeWorker(place.remote(), slot=-1, pid=bystander.pid).start()
            worker.freeze()
            wait_until(lambda: "worker told to end itself: silent for" in broker.log())
            assert list(workers(frontend).values()) == ["gone"]
            worker.thaw()
            assert worker.is_gone.wait(10)
            assert worker.told_to_quit is not None
            assert "worker_timeout" in worker.told_to_quit
            worker.stop()
            assert bystander.poll() is None
            with FakeWorker(place.remote(), slot=-1, pid=bystander.pid):
                bystander.kill()
                bystander.wait()
                frontend.submit(1, [[5]])
                assert frontend.wait(1) == [vector_of([5])]
                assert "ready" in workers(frontend).values()
    finally:
        bystander.kill()
        bystander.wait()


def test_a_link_that_is_cut_blames_nobody(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    """The broker finds out as it sends. Nobody can tell whether the worker died: no attempt is charged."""
    broker = start("--max_batch_size=1")
    process = psutil.Process(broker.process.pid)
    with FakeFrontend(run_dir) as frontend:
        with Stranger(place.endpoint, place.keys_of("gpu1")) as leaver:
            hello = (m.PROTOCOL_VERSION, "", -1, 1, 1, "cpu", MODEL, LIMITS)
            leaver.socket.send_multipart(encode(m.WorkerHello(*hello)))
            assert leaver.socket.poll(5000)
            canary, _ = Decoder(m.Work).decode(leaver.socket.recv_multipart())
            done = m.Done(canary.boot_id, canary.batch_id, [len(CANARY_ROW)], [], 1.0)
            leaver.socket.send_multipart(encode(done, array("f", CANARY_ROW).tobytes()))
            wait_until(lambda: workers(frontend) == {"worker-gpu1-1": "ready"})
        wait_until(lambda: not [each for each in process.net_connections("tcp") if each.status == "ESTABLISHED"])
        frontend.submit(1, [[5]])
        wait_until(lambda: workers(frontend) == {"worker-gpu1-1": "gone"})
        with FakeWorker(run_dir, slot=0):
            assert frontend.wait(1) == [vector_of([5])]
    assert "worker cannot be reached: its work is moved worker=worker-gpu1-1" in broker.log()


# ---- the broker itself ----


def test_a_restarted_broker_gets_its_workers_back(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    first = start()
    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote()) as worker:
        first.process.kill()
        first.process.wait()
        first.log_file.unlink()
        worker.is_joined.clear()
        start()
        assert worker.is_joined.wait(10)
        frontend.greet()
        frontend.submit(1, [[8]])
        assert frontend.wait(1) == [vector_of([8])]


def test_it_drains_with_its_remote_workers(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    broker = start()
    proceed = threading.Event()

    def gated(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        proceed.wait(10)
        return encode_batch(inputs, work)

    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote(), model=gated) as worker:
        frontend.submit(1, [[1], [2]])
        wait_until(lambda: worker.batches)
        broker.process.send_signal(signal.SIGTERM)
        frontend.read_until(lambda: frontend.state is not None and frontend.state.draining)
        proceed.set()
        assert frontend.wait(1) == [vector_of([1]), vector_of([2])]
        assert broker.process.wait(10) == 0
        assert worker.is_gone.wait(10)


def test_a_port_that_is_taken_is_one_clear_line(place: Place) -> None:
    with sockets.create_server(("127.0.0.1", place.port)):
        flags = (f"--broker={place.endpoint}", f"--curve_keys={place.keys / 'broker'}")
        broker = Broker(place.run_dir, *flags)
        assert broker.process.wait(20) == EXIT_CANNOT_START
    (line,) = [line for line in broker.log().splitlines() if " ERROR " in line]
    assert f"broker: cannot listen on {place.endpoint}: Address already in use" in line


def test_keys_that_cannot_be_read_are_one_clear_line(place: Place) -> None:
    (place.keys / "broker" / "broker.key_secret").chmod(0o644)
    broker = Broker(place.run_dir, f"--broker={place.endpoint}", f"--curve_keys={place.keys / 'broker'}")
    assert broker.process.wait(20) == EXIT_CANNOT_START
    (line,) = broker.log().splitlines()
    assert "curve_keys: " in line
    assert "mode 0644" in line


_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""As ZMTP 3 begins, from a client."""


def test_bytes_that_are_no_handshake(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    """From whoever can reach the port: it is closed for them, and nobody else notices."""
    broker = start()
    process = psutil.Process(broker.process.pid)
    seed = 23
    random = Random(seed)
    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote()):
        before = process.num_fds()
        for number in range(300):
            with sockets.create_connection(("127.0.0.1", place.port)) as stranger:
                junk = random.randbytes(random.randrange(1, 400))
                with contextlib.suppress(OSError):
                    stranger.sendall((_GREETING if number % 2 else b"") + junk)
        frontend.submit(1, [[8]])
        assert frontend.wait(1) == [vector_of([8])]
        wait_until(lambda: process.num_fds() <= before, within_s=15, what=f"descriptors given back, seed {seed}")
    assert broker.process.poll() is None


def test_strangers_who_say_nothing_are_cut_off(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    """They hold a file descriptor of the broker each."""
    broker = start()
    process = psutil.Process(broker.process.pid)
    with FakeFrontend(run_dir) as frontend, FakeWorker(place.remote()):
        before = process.num_fds()
        address = ("127.0.0.1", place.port)
        silent = [sockets.create_connection(address) for _ in range(40)]
        wait_until(lambda: process.num_fds() >= before + 40)
        frontend.submit(1, [[8]])
        assert frontend.wait(1) == [vector_of([8])]
        wait_until(lambda: process.num_fds() <= before, within_s=15)
        for each in silent:
            each.close()


# ---- the worker's side ----


def joined(broker: Broker) -> int:
    return broker.log().count("worker ready") + broker.log().count("worker is back")


def test_a_link_that_is_cut_again_and_again_loses_nothing(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    """Batches and answers on their way are gone; the worker connects again each time, and every request is answered rightly."""
    broker = start("--max_batch_size=1", "--request_timeout=30")
    with TcpProxy(place.port) as link, FakeFrontend(run_dir) as frontend:
        worker = RunningWorker(RemoteBroker(f"tcp://127.0.0.1:{link.port}", place.keys_of("gpu1")), supervised=False)
        worker.loaded.set()
        try:
            wait_until(lambda: joined(broker))
            for round_number in range(6):
                rids = range(100 * round_number, 100 * round_number + 10)
                frontend.submit_many({rid: [[1 + rid, 2], [3]] for rid in rids})
                link.cut()
                for rid in rids:
                    assert frontend.wait(rid) == [[3.0 + rid, 0.0], [3.0, 0.0]]
        finally:
            worker.end()
        assert worker.exit_status() == 0


def test_it_comes_back_after_something_else_answered_in_the_brokers_place(
    start: StartBroker, place: Place, run_dir: RunDir
) -> None:
    """ZeroMQ itself gives a connection up for good when what listens does not speak its protocol."""
    broker = start()
    with TcpProxy(place.port) as link, FakeFrontend(run_dir) as frontend:
        worker = RunningWorker(RemoteBroker(f"tcp://127.0.0.1:{link.port}", place.keys_of("gpu1")), supervised=False)
        worker.loaded.set()
        try:
            wait_until(lambda: joined(broker) == 1)
            with link.answering(b"HTTP/1.1 503 Service Unavailable\r\n\r\n"):
                before = link.accepted
                link.cut()
                wait_until(lambda: link.accepted > before)
            worker.model.gate.clear()
            frontend.submit(1, [[4, 4]])
            worker.model.gate.set()
            assert frontend.wait(1, within_s=20) == [[8.0, 0.0]]
        finally:
            worker.end()
        assert worker.exit_status() == 0


def test_a_worker_whose_key_is_refused_as_it_connects_again_ends(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    first = start()
    worker = RunningWorker(place.remote(), supervised=False)
    worker.loaded.set()
    try:
        wait_until(lambda: joined(first))
        first.process.kill()
        first.process.wait()
        (place.allowed / "gpu1.key").unlink()
        start()
        assert worker.exit_status() == EXIT_CANNOT_START
        assert worker.exits == [EXIT_CANNOT_START]
    finally:
        worker.end()


def test_a_worker_whose_broker_stays_away_ends_to_be_started_again(start: StartBroker, place: Place) -> None:
    """Also while it runs a batch that never returns: nobody else would end it."""
    broker = start()
    worker = RunningWorker(place.remote(), supervised=False, give_up_after_s=0.5)
    worker.model.gate.clear()
    worker.loaded.set()
    try:
        wait_until(lambda: worker.model.begun)
        broker.process.kill()
        broker.process.wait()
        wait_until(lambda: worker.exits == [1])
    finally:
        worker.end()


def test_one_who_was_given_up_ends_although_its_batch_never_returns(start: StartBroker, place: Place, run_dir: RunDir) -> None:
    start("--batch_timeout=1")
    worker = RunningWorker(place.remote(), supervised=False)
    worker.model.gate.clear()
    worker.loaded.set()
    try:
        wait_until(lambda: worker.model.begun)
        wait_until(lambda: worker.exits == [1])
    finally:
        worker.end()


_STUCK = """
import ctypes, sys
sys.path[:0] = {path!r}
from packhorse_shared.key_folders import read_worker_keys
from packhorse_shared.watchdog import Watchdog
from packhorse_worker.compute import run_worker
from packhorse_worker.orders import WorkerIdentity
from packhorse_worker.meeting import RemoteBroker
from pathlib import Path
import os

def load():
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock, as a driver may that is stuck

meeting = RemoteBroker({endpoint!r}, read_worker_keys(Path({keys!r})))
who = WorkerIdentity(-1, "cpu", os.getpid(), 1, supervised=False)
run_worker(meeting, who, load, os.pipe2(os.O_NONBLOCK)[0], watchdog=Watchdog(1.0))
"""


def test_one_that_is_stuck_altogether_ends_itself(start: StartBroker, place: Place) -> None:
    """It cannot read that the broker gave it up, and nobody on its machine would notice."""
    start()
    code = _STUCK.format(path=sys.path, endpoint=place.endpoint, keys=str(place.keys / "gpu1"))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "Timeout" in ended.stderr
    assert "in load" in ended.stderr


def test_without_the_gate_nobody_comes_in(place: Place) -> None:
    """ZeroMQ by itself lets every key in when nobody is there to be asked."""
    context: zmq.Context[Any] = zmq.Context()
    door = open_tcp_router(context, place.endpoint, read_broker_keys(place.keys / "broker"))
    try:
        with Stranger(place.endpoint, place.keys_of("gpu1")) as stranger:
            wait_until(lambda: Connection.UNPROVEN in stranger.look())
            assert Connection.UP not in stranger.look()
    finally:
        door.close()
        context.destroy(linger=0)
