"""``packhorse worker``: one process on one device. supervisord passes ``--slot N``; without one it joins a running server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packhorse_shared.arguments import Parser, add_settings, load_settings
from packhorse_shared.cores import usable_cores
from packhorse_shared.devices import CPU, device_words
from packhorse_shared.environment import SUPERVISED
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError, PackhorseError
from packhorse_shared.logs import configure_logs
from packhorse_shared.model_folder import find_folder, served_names
from packhorse_shared.run_dir import RunDir, run_dir_of
from packhorse_shared.settings import Settings
from packhorse_shared.watchdog import Watchdog
from packhorse_worker.backend import Backend
from packhorse_worker.brake import Brake
from packhorse_worker.compute import run_worker
from packhorse_worker.joining import join
from packhorse_worker.loop import EXIT_FAULT
from packhorse_worker.meeting import MeetingPoint
from packhorse_worker.orders import WorkerIdentity

log = logging.getLogger(__name__)

_BY_HAND = -1
_STUCK_AFTER_S = 60.0
"""Imports and weights can hold up the I/O thread of a worker that loads for some seconds."""
_SPINS = 10_000
"""Rounds that a thread of a forward pass waits for another before it gives its core away. libgomp's own 300,000 are some 8 %
faster on cores that nobody else wants, and ten times slower where anybody does: the thread that is waited for cannot run."""


@dataclass(frozen=True)
class _Place:
    """Where this worker runs."""

    run_dir: RunDir | None
    """None for one that joined from another machine."""
    slot: int
    device: str
    threads: int
    workers_on_device: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker until it is told to stop; returns the exit status: 0, 1 after a fault, 3 when it cannot start."""
    parsed = _parser().parse_args(arguments)
    try:
        meeting: MeetingPoint
        if parsed.slot is None:
            settings, meeting = join(parsed, os.environ)
        else:
            settings = load_settings(parsed, os.environ)
            meeting = run_dir_of(settings.process, settings.http.port, os.environ.get("XDG_RUNTIME_DIR"))
            meeting.prepare()
        slot = _BY_HAND if parsed.slot is None else parsed.slot
        configure_logs(settings.process, f"worker-{os.getpid() if slot == _BY_HAND else slot}")
        place = _place(settings, meeting if isinstance(meeting, RunDir) else None, slot, os.environ)
    except PackhorseError as problem:
        sys.stderr.write(f"packhorse worker: {problem}\n")
        return EXIT_CANNOT_START
    supervised = SUPERVISED in os.environ and slot != _BY_HAND
    return _run(settings, meeting, place, supervised=supervised)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="packhorse worker",
        description="Run one worker process. Without --slot it joins a running server, of this machine or with --broker of "
        "another, and takes model and settings from it.",
    )
    parser.add_argument("--slot", type=int, metavar="N", help="number of this worker under supervisord, which passes it")
    add_settings(parser)
    return parser


def _place(settings: Settings, run_dir: RunDir | None, slot: int, environ: Mapping[str, str]) -> _Place:
    workers = settings.workers
    words = device_words(workers.devices, environ.get("CUDA_VISIBLE_DEVICES"))
    number = 0 if slot == _BY_HAND else slot // workers.workers_per_device
    return _Place(
        run_dir=run_dir,
        slot=slot,
        device=words[number % len(words)],
        threads=max(1, usable_cores() // (len(words) * workers.workers_per_device)),
        workers_on_device=workers.workers_per_device,
    )


def _run(settings: Settings, meeting: MeetingPoint, place: _Place, *, supervised: bool) -> int:
    brake = Brake(place.run_dir.path / f"worker-{place.slot}.starts") if supervised and place.run_dir is not None else None
    who = WorkerIdentity(place.slot, place.device, os.getpid(), secrets.randbits(63), supervised)

    def leave(status: int) -> int:
        if brake is not None and status != EXIT_FAULT:
            brake.end()
        return status

    def load() -> Backend:
        if brake is not None and (wait_s := brake.begin(time.monotonic())) > 0:
            log.warning("this worker died soon after its last starts, so it waits", extra={"wait_s": wait_s})
            time.sleep(wait_s)
        return _load(settings, place)

    def exit_now(status: int) -> None:
        os._exit(leave(status))

    # On this machine the broker kills a worker that is stuck.
    watchdog = None if meeting.curve_keys is None else Watchdog(_STUCK_AFTER_S)
    return leave(run_worker(meeting, who, load, _signals(), exit_now=exit_now, watchdog=watchdog))


def _signals() -> int:
    """A descriptor with a byte to read for every SIGTERM and SIGINT, at once whatever the main thread does."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return read_end


def spinning(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that say how threads wait for each other, unless they are set already."""
    is_set = "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ
    return {} if is_set else {"GOMP_SPINCOUNT": str(_SPINS)}


def _load(settings: Settings, place: _Place) -> Backend:
    """The model, loaded and warmed up. What is wrong with its files is found before torch is imported: that takes seconds."""
    from packhorse_worker.engine.files.model_folder import read_model_folder  # noqa: PLC0415 (as below: only once we are announced)
    from packhorse_worker.engine.files.weights import find_weights  # noqa: PLC0415

    began = time.monotonic()
    folder = read_model_folder(find_folder(settings.model, weights=True), settings.model)
    _read_ahead(find_weights(folder.transformer, allow_pickle=settings.model.allow_pickle_weights))
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if place.device == CPU else place.device
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(place.threads)
    os.environ.update(spinning(os.environ))
    gc.disable()  # importing and loading make a million objects and hardly any garbage
    import torch  # noqa: PLC0415 (only now does the environment say what it must)

    from packhorse_worker.engine.api.encoder import Encoder  # noqa: PLC0415
    from packhorse_worker.engine.load import Device  # noqa: PLC0415

    torch.set_num_threads(place.threads)
    torch.set_num_interop_threads(1)
    if place.device != CPU and not torch.cuda.is_available():
        raise CannotStartError(f"devices: torch finds no CUDA device under CUDA_VISIBLE_DEVICES={place.device}")
    device = Device(torch.device("cpu" if place.device == CPU else "cuda:0"), place.workers_on_device)
    encoder = Encoder.from_settings(folder, served_names(settings.model)[0], settings.model, settings.batching, device)
    gc.collect()
    gc.freeze()
    gc.enable()
    log.info("ready", extra={"seconds": round(time.monotonic() - began, 2), "device": place.device, "threads": place.threads})
    return encoder


def _read_ahead(paths: Sequence[Path]) -> None:
    """Let the kernel read the weights while Python imports torch."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


if __name__ == "__main__":
    sys.exit(main())
