"""Where a worker runs: its device, which is the only one that it sees, and its share of the cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packhorse_shared.cores import usable_cores
from packhorse_shared.devices import AUTO, BUS_ORDER, CPU, ORDER, VISIBLE, Devices, checked_words, find_devices
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import WorkerSettings

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
    """A word for CUDA_VISIBLE_DEVICES, or cpu."""
    threads: int
    """Of one forward pass; at least 1."""
    workers_on_device: int
    was_cut_off: bool = False
    """Whether this slot's start before this one did not end well."""


def find_place(workers: WorkerSettings, run_dir: RunDir | None, slot: int, environ: Mapping[str, str]) -> tuple[Place, Devices]:
    """The place of a slot, and all devices of this server. Raises SettingsError when a word names no device.

    Slots go round the devices, so that any number of workers, as ``packhorse scale`` leaves it, is spread evenly.
    """
    devices = _devices(workers, run_dir, slot, environ)
    words = devices.words
    place = Place(
        run_dir=run_dir,
        slot=slot,
        device=words[0 if slot == BY_HAND else slot % len(words)],
        threads=max(1, usable_cores() // (len(words) * workers.workers_per_device)),
        workers_on_device=workers.workers_per_device,
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
    if workers.devices == (AUTO,) and run_dir is not None and (decided := run_dir.read_devices()) is not None:
        visible = environ.get(VISIBLE)
        if visible == decided.cuda_visible_devices or (is_by_hand and visible is None):
            return Devices(decided.words)
    return find_devices(workers.devices, environ)


def environment_of(place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker must have before torch is imported: it sees its device alone, as cuda:0, or no GPU at all.

    An order of devices and a way of waiting that the user chose are kept.
    """
    found = {VISIBLE: "" if place.device == CPU else place.device}
    if ORDER not in environ:
        found[ORDER] = BUS_ORDER
    found |= {name: str(place.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if "GOMP_SPINCOUNT" not in environ and "OMP_WAIT_POLICY" not in environ:
        found["GOMP_SPINCOUNT"] = str(_SPINS)
    return found
