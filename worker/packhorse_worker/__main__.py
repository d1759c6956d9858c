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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packhorse_shared.arguments import Parser, add_settings, load_settings
from packhorse_shared.devices import CPU
from packhorse_shared.environment import SUPERVISED
from packhorse_shared.errors import EXIT_CANNOT_START, PackhorseError
from packhorse_shared.logs import configure_logs
from packhorse_shared.model_folder import find_folder, served_names
from packhorse_shared.run_dir import RunDir, run_dir_of
from packhorse_shared.settings import Settings
from packhorse_shared.watchdog import Watchdog
from packhorse_worker.backend import Backend
from packhorse_worker.brake import Brake
from packhorse_worker.compute import run_worker
from packhorse_worker.cuda_device import check_cuda
from packhorse_worker.joining import join, left_out
from packhorse_worker.loop import EXIT_FAULT
from packhorse_worker.meeting import MeetingPoint
from packhorse_worker.orders import WorkerIdentity
from packhorse_worker.place import BY_HAND, Place, environment_of, find_place
from packhorse_worker.sighting import Sighting, life_of

log = logging.getLogger(__name__)

_STUCK_AFTER_S = 60.0
"""Imports and weights can hold up the I/O thread of a worker that loads for some seconds."""


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
        slot = BY_HAND if parsed.slot is None else parsed.slot
        configure_logs(settings.process, f"worker-{os.getpid() if slot == BY_HAND else slot}")
        place, devices = find_place(settings.workers, meeting if isinstance(meeting, RunDir) else None, slot, os.environ)
    except PackhorseError as problem:
        sys.stderr.write(f"packhorse worker: {problem}\n")
        return EXIT_CANNOT_START
    os.environ.update(environment_of(place, os.environ))
    for remark in devices.remarks:
        log.log(logging.WARNING if remark.is_warning else logging.INFO, remark.text)
    if slot == BY_HAND and (in_vain := left_out(parsed, os.environ, meeting)):
        log.warning("%s", in_vain)
    supervised = SUPERVISED in os.environ and slot != BY_HAND
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


def _run(settings: Settings, meeting: MeetingPoint, place: Place, *, supervised: bool) -> int:
    brake = None
    if supervised and place.run_dir is not None:
        brake = Brake(place.run_dir.path / f"worker-{place.slot}.starts")
        # Our parent is supervisord, and the server lives as long as it does.
        sighting = Sighting(place.run_dir.path / f"worker-{place.slot}.device", place.visible, life_of(os.getppid()))
        place = replace(place, sighting=sighting)
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
    status = leave(run_worker(meeting, who, load, _signals(), exit_now=exit_now, watchdog=watchdog))
    if status == EXIT_FAULT and place.device != CPU:
        logging.shutdown()
        os._exit(status)  # to take down what hangs on a lost device may hang or abort
    return status


def _signals() -> int:
    """A descriptor with a byte to read for every SIGTERM and SIGINT, at once whatever the main thread does."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return read_end


def _load(settings: Settings, place: Place) -> Backend:
    """The model, loaded and warmed up. What is wrong with its files is found before torch is imported: that takes seconds."""
    from packhorse_worker.engine.files.model_folder import read_model_folder  # noqa: PLC0415 (as below: only once we are announced)
    from packhorse_worker.engine.files.weights import find_weights  # noqa: PLC0415

    began = time.monotonic()
    folder = read_model_folder(find_folder(settings.model, weights=True), settings.model)
    _read_ahead(find_weights(folder.transformer, allow_pickle=settings.model.allow_pickle_weights))
    gc.disable()  # importing and loading make a million objects and hardly any garbage
    import torch  # noqa: PLC0415 (it takes seconds, and the environment must say what it may see)

    from packhorse_worker.engine.api.encoder import Encoder  # noqa: PLC0415
    from packhorse_worker.engine.judging import judge_load  # noqa: PLC0415
    from packhorse_worker.engine.load import Device  # noqa: PLC0415
    from packhorse_worker.engine.surroundings import settle_cuda  # noqa: PLC0415

    torch.set_num_threads(place.threads)
    torch.set_num_interop_threads(1)
    if place.device != CPU:
        check_cuda(torch, place)
        settle_cuda()
    device = Device(torch.device("cpu" if place.device == CPU else "cuda:0"), place.workers_on_device)
    try:
        encoder = Encoder.from_settings(folder, served_names(settings.model)[0], settings.model, settings.batching, device)
    except Exception as problem:
        if (judged := judge_load(problem)) is not None:
            raise judged from problem
        raise
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
