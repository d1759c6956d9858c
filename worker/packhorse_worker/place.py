"""Where a worker runs: its device, which is the only one that it sees, and its share of the cores."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from packhorse_shared.cores import usable_cores
from packhorse_shared.devices import AUTO, BUS_ORDER, CPU, ORDER, VISIBLE, Devices, checked_words, find_devices
from packhorse_shared.run_dir import RunDir, ServerDevices
from packhorse_shared.settings import WorkerSettings
from packhorse_worker.sighting import Sighting

log = logging.getLogger(__name__)

BY_HAND = -1
"""The slot of a worker that supervisord did not start."""
_SPINS = 10_000
"""Rounds that a thread of a forward pass waits for another before it gives its core away. libgomp's own 300,000 are some 8 %
faster on cores that nobody else wants, and ten times slower where anybody does: the thread that is waited for cannot run."""


@dataclass(frozen=True)
class Place:
    """Where this worker runs."""

    run_dir: RunDir | None
    """None for one that joined from another machine."""
    slot: int
    device: str
    """A word for CUDA_VISIBLE_DEVICES, or cpu: the name under which logs and /status show it."""
    threads: int
    """Of one forward pass; at least 1."""
    workers_on_device: int
    uuid: str = ""
    """What CUDA is told instead of the word; empty where that is the word itself."""
    sighting: Sighting | None = None
    """None for a worker that supervisord does not restart."""

    @property
    def visible(self) -> str:
        """For CUDA_VISIBLE_DEVICES."""
        return "" if self.device == CPU else self.uuid or self.device


def find_place(workers: WorkerSettings, run_dir: RunDir | None, slot: int, environ: Mapping[str, str]) -> tuple[Place, Devices]:
    """The place of a slot, and all devices of this server. Raises SettingsError when a word names no device.

    Slots go round the devices, so that any number of workers, as ``packhorse scale`` leaves it, is spread evenly.
    """
    devices = _devices(workers, run_dir, slot, environ)
    words = devices.words
    index = 0 if slot == BY_HAND else slot % len(words)
    place = Place(
        run_dir=run_dir,
        slot=slot,
        device=words[index],
        threads=max(1, usable_cores() // (len(words) * workers.workers_per_device)),
        workers_on_device=workers.workers_per_device,
        uuid=devices.uuids[index] if devices.uuids else "",
    )
    return place, devices


def _devices(workers: WorkerSettings, run_dir: RunDir | None, slot: int, environ: Mapping[str, str]) -> Devices:
    """What ``auto`` meant when the server started holds for its life: a card that is lost meanwhile must not turn its worker
    into one on another card, or on the CPU. Words that were listed have been compared with the driver's at that start, too;
    asking it takes seconds on some machines. A worker started by hand may have a CUDA_VISIBLE_DEVICES of its own.
    """
    is_by_hand = slot == BY_HAND
    if workers.devices != (AUTO,) and not is_by_hand:
        return Devices(checked_words(workers.devices))
    if workers.devices == (AUTO,) and run_dir is not None:
        decided, visible = run_dir.read_devices(), environ.get(VISIBLE)
        if decided is not None and (visible == decided.cuda_visible_devices or (is_by_hand and visible is None)):
            return Devices(decided.words, uuids=decided.uuids)
        if not is_by_hand:
            _warn(run_dir, decided, visible)
    return find_devices(workers.devices, environ)


def _warn(run_dir: RunDir, decided: ServerDevices | None, visible: str | None) -> None:
    if decided is None:
        reason = f"{run_dir.devices_file} is missing or not readable"
    else:
        was, now = ("not set" if each is None else each or "empty" for each in (decided.cuda_visible_devices, visible))
        reason = f"{VISIBLE} was {was} when the server started and is {now} here"
    log.warning("devices: %s, so this worker decides anew what auto means; supervisorctl start slots writes it again", reason)


def environment_of(place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker must have before torch is imported: it sees its device alone, as cuda:0, or no GPU at all.

    An order of devices and a way of waiting that the user chose are kept.
    """
    found = {VISIBLE: place.visible}
    if ORDER not in environ:
        found[ORDER] = BUS_ORDER
    found |= {name: str(place.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if "GOMP_SPINCOUNT" not in environ and "OMP_WAIT_POLICY" not in environ:
        found["GOMP_SPINCOUNT"] = str(_SPINS)
    return found
