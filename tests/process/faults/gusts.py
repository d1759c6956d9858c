"""The faults of a storm: each is one thing that happens to a running server, with all else at random."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
import zmq

from forgery import Forger
from harm import kill, ready_workers, stopped
from load import Load
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import new_identity, open_dealer
from questions import CLS, HARMLESS, ask, random_questions
from report import Report, Sent
from standin_stack import StandInStack
from waiting import wait_until

KILLS, HANGS = 98, 99
WORKERS = 3
FRONTENDS = 2


@dataclass
class Outage:
    """One frontend is gone: its clients lose what they had open there."""

    began: float
    ended: float = float("inf")

    def touches(self, sent: Sent) -> bool:
        return sent.sent <= self.ended and sent.ended >= self.began


class Logbook:
    """What all that do harm share."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.outages: list[Outage] = []
        self.reports: list[tuple[str, Report]] = []
        """Of loads that were faults themselves, with what they were."""
        self.spares_some = False
        """The broker and the first frontend are not killed from now on, so that their memory can be watched."""
        self.lock = threading.Lock()
        self.one_frontend_at_a_time = threading.Lock()
        self._unique = 0

    def note(self, fault: str) -> int:
        """Returns a number that no other fault has."""
        with self.lock:
            self.counts[fault] += 1
            self._unique += 1
            return self._unique


class Gusts:
    """Does harm to a server; several threads may each have gusts of their own."""

    def __init__(self, stack: StandInStack, seed: int, folder: Path, log: Logbook) -> None:
        self._log = log
        self._stack = stack
        self._random = Random(seed)
        self._number = 0
        self._forger = Forger(seed, folder / "unpickled")
        self._kinds: list[Callable[[], None]] = [
            self.kill_worker,
            self.kill_worker,
            self.kill_all_workers,
            self.stop_worker,
            self.kill_broker,
            self.kill_frontend,
            self.ask_poison,
            self.ask_forever,
            self.send_malformed,
            self.restart_worker,
            self.scale,
            self.leave,
            self.overload,
            self.send_slowly,
        ]

    def blow(self) -> None:
        """One fault, chosen at random, until it is over."""
        kind = self._random.choice(self._kinds)
        self._number = self._log.note(kind.__name__)
        self._stack.forget_deaths()
        # A process that is to be harmed may have ended by another fault a moment before.
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            kind()

    def pause_s(self) -> float:
        return self._random.uniform(0.1, 2.0)

    # ---- processes ----

    def kill_worker(self) -> None:
        if workers := self._stack.processes("worker"):
            kill(self._random.choice(workers).pid)

    def kill_all_workers(self) -> None:
        for worker in self._stack.processes("worker"):
            kill(worker.pid)

    def stop_worker(self) -> None:
        if workers := self._stack.processes("worker"):
            with stopped(self._random.choice(workers).pid):
                time.sleep(self._random.uniform(0.2, 2.5))

    def restart_worker(self) -> None:
        if workers := ready_workers(self._stack):
            os.kill(self._random.choice(workers)["pid"], signal.SIGTERM)

    def kill_broker(self) -> None:
        for broker in [] if self._log.spares_some else self._stack.processes("broker"):
            kill(broker.pid)

    def kill_frontend(self) -> None:
        """One at a time: while the other serves, nobody may be refused."""
        with self._log.one_frontend_at_a_time:
            frontends = self._stack.processes("frontend")
            victims = [each for each in frontends if not self._log.spares_some or each.cmdline()[-1] != "0"]
            self._log.outages.append(Outage(time.monotonic()))
            kill(self._random.choice(victims).pid)
            wait_until(self._all_listen, 60, "the frontend's successor")
            self._log.outages[-1].ended = time.monotonic()

    def _all_listen(self) -> bool:
        found = [each for each in self._stack.processes("frontend") if _listens(each)]
        return len(found) == FRONTENDS

    def scale(self) -> None:
        for count in (self._random.randint(1, 5), WORKERS):
            self._stack.packhorse("scale", str(count), f"--run_dir={self._stack.run_dir}")
            time.sleep(self._random.uniform(0.5, 1.5))

    # ---- requests ----

    def ask_poison(self) -> None:
        self._ask_trap("poison", KILLS)

    def ask_forever(self) -> None:
        self._ask_trap("stuck", HANGS)

    def overload(self) -> None:
        """More than the server can do, for a second."""
        questions = random_questions(self._random.randrange(1 << 30), 20, inputs=64)
        self._run("overload", Load(self._stack.port, questions, clients=60, seed=1), 1.0)

    def leave(self) -> None:
        """Clients that ask for much and are gone."""
        for question in random_questions(self._random.randrange(1 << 30), 10, inputs=40):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._stack.port), 5) as client:
                client.sendall(question.wire[: self._random.choice([len(question.wire), len(question.wire) // 2])])
                time.sleep(self._random.uniform(0, 0.05))

    def send_slowly(self) -> None:
        """Half a head, a byte now and then."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._stack.port), 5) as client:
            for byte in b"POST /v1/embeddings HTTP/1.1":
                client.sendall(bytes([byte]))
                time.sleep(0.05)

    def send_malformed(self) -> None:
        run_dir = RunDir(self._stack.run_dir)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for endpoint in (run_dir.frontends_endpoint, run_dir.workers_endpoint):
            with open_dealer(context, endpoint, new_identity("forged", secrets.randbelow(1000))) as forged:
                for _ in range(100):
                    forged.send_multipart(self._forger.frames())
        context.term()

    def _ask_trap(self, name: str, trap: int) -> None:
        """An input that nobody has asked for before: one that is known to kill is refused at once."""
        number = self._number
        words = [CLS + 8 + number % len(HARMLESS), CLS + 8 + number // len(HARMLESS) % len(HARMLESS)]
        text = " ".join(f"t{word}" for word in [trap, *words])
        self._run(name, Load(self._stack.port, [ask([text])], clients=1, at_most=1), 0.0)

    def _run(self, name: str, load: Load, seconds: float) -> None:
        with load:
            time.sleep(seconds)
        self._log.reports.append((name, load.report()))


def _listens(process: psutil.Process) -> bool:
    try:
        return any(each.status == psutil.CONN_LISTEN for each in process.net_connections(kind="tcp"))
    except psutil.Error:
        return False
