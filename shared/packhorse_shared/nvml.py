"""What NVIDIA's driver tells of its GPUs, through NVML: it makes no CUDA context, so any process may ask.

Source: NVIDIA, "NVML API Reference Guide", device queries and multi instance GPU management.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

_PATIENCE_S = 2.0
"""After so long it is told what is waited for."""


@dataclass(frozen=True)
class Slice:
    """A MIG device: a part of a card with memory of its own."""

    uuid: str
    """MIG-..., as nvidia-smi -L shows it."""
    path: str
    """Its older name, MIG-<UUID of the card>/<GPU instance>/<compute instance>, which CUDA takes too. Empty if not known."""


@dataclass(frozen=True)
class Card:
    """A GPU. ``index`` is as nvidia-smi counts, in the order of PCI buses."""

    index: int
    uuid: str
    slices: tuple[Slice, ...] | None = None
    """None while the card is not in MIG mode. In it CUDA runs on slices only."""


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this machine (of this container), as far as the driver tells."""

    cards: tuple[Card, ...] = ()
    unreadable: tuple[tuple[int, str], ...] = ()
    """Index and complaint of each card that the driver lists and cannot reach: one that fell off its bus."""
    problem: str = ""
    """Why nothing is known. Empty when the driver answered."""
    is_broken: bool = False
    """Whether there is a driver that should work and does not, or cards that cannot be reached; not just none of either."""

    @property
    def count(self) -> int:
        """GPUs that the driver lists."""
        return len(self.cards) + len(self.unreadable)


def read_inventory() -> Inventory:
    """Ask the driver. Never fails: what goes wrong is in the answer. May take long, which is then told in one line."""
    import pynvml  # noqa: PLC0415 (only where devices are asked for)

    with _telling_of_a_wait():
        return _ask(pynvml)


@contextmanager
def _telling_of_a_wait() -> Iterator[None]:
    """By a thread: NVML cannot be interrupted, and lets others run while it waits."""
    timer = threading.Timer(
        _PATIENCE_S,
        log.warning,
        [
            "waiting for the NVIDIA driver, for more than %g s: it may be loading (nvidia-persistenced keeps it loaded); if "
            "nvidia-smi hangs too, it is stuck",
            _PATIENCE_S,
        ],
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _ask(pynvml: Any) -> Inventory:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return Inventory(problem=_explain(pynvml, error), is_broken=not is_missing)
    try:
        return _read_cards(pynvml)
    except pynvml.NVMLError as error:
        return Inventory(problem=_explain(pynvml, error), is_broken=True)
    finally:
        pynvml.nvmlShutdown()


def _read_cards(pynvml: Any) -> Inventory:
    cards: list[Card] = []
    unreadable: list[tuple[int, str]] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            unreadable.append((index, str(error)))
        else:
            cards.append(Card(index, uuid, _read_slices(pynvml, handle, uuid)))
    if not cards and not unreadable:
        return Inventory(problem="the NVIDIA driver lists no GPU", is_broken=True)
    return Inventory(tuple(cards), tuple(unreadable), is_broken=bool(unreadable))


def _read_slices(pynvml: Any, handle: Any, card_uuid: str) -> tuple[Slice, ...] | None:
    """The MIG devices of a card; None where it is not in MIG mode, or too old to have one."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return None
    slices = []
    for number in range(most):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuid = str(pynvml.nvmlDeviceGetUUID(part))
        except pynvml.NVMLError:
            continue  # a place where a slice could be
        slices.append(Slice(uuid, _path(pynvml, part, card_uuid)))
    return tuple(slices)


def _path(pynvml: Any, part: Any, card_uuid: str) -> str:
    try:
        instance, compute = pynvml.nvmlDeviceGetGpuInstanceId(part), pynvml.nvmlDeviceGetComputeInstanceId(part)
    except pynvml.NVMLError:
        return ""
    return f"MIG-{card_uuid}/{instance}/{compute}"


def _explain(pynvml: Any, error: Any) -> str:
    """An error of NVML as what is wrong with this machine, and what to do."""
    match error.value:
        case pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return "no NVIDIA driver is installed"
        case pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return "the NVIDIA driver is installed and not loaded, or its /dev/nvidia* are missing here; see nvidia-smi"
        case pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return "the NVIDIA driver's library and kernel module are of different versions; reboot, or load the module again"
        case pynvml.NVML_ERROR_NO_PERMISSION:
            return "this user may not use the NVIDIA driver; see the permissions of /dev/nvidia*"
        case _:
            return f"the NVIDIA driver does not answer: {error}"
