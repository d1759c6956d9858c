"""NVML for a machine whose GPUs are told in STUB_GPUS: this folder first on PYTHONPATH (or ``sys.path``) gives any process
that asks the driver these cards. Nothing here is CUDA: torch finds none of them.

STUB_GPUS is JSON: ``{"cards": [{"uuid": "GPU-a"}, {"uuid": "GPU-b", "slices": ["MIG-x", "MIG-y"]}, {"lost": true}]}`` or
``{"error": 18}``. STUB_LOG names a file to which each process that asks adds its command line; STUB_WAIT one until whose
existence the driver does not answer; STUB_DIES is the number of a signal that whoever asks dies of.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_UNKNOWN = 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({NVML_ERROR_GPU_IS_LOST: "GPU is lost"}.get(value, f"error {value}"))
        self.value = value


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = json.loads(os.environ["STUB_GPUS"])
    return machine


def nvmlInit() -> None:  # noqa: N802
    if "STUB_LOG" in os.environ:
        words = Path("/proc/self/cmdline").read_text().split("\0")
        with Path(os.environ["STUB_LOG"]).open("a") as log:
            log.write(" ".join(words) + "\n")
    ends_at = time.monotonic() + 120
    while "STUB_WAIT" in os.environ and not Path(os.environ["STUB_WAIT"]).exists() and time.monotonic() < ends_at:
        time.sleep(0.02)
    if "STUB_DIES" in os.environ:
        os.kill(os.getpid(), int(os.environ["STUB_DIES"]))
    if "error" in _machine():
        raise NVMLError(_machine()["error"])


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "555.5"


def nvmlDeviceGetMemoryInfo(handle: Any) -> Any:  # noqa: N802
    return SimpleNamespace(total=80 << 30)


def nvmlDeviceGetName(handle: Any) -> str:  # noqa: N802
    return "a card that is none"


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_machine()["cards"])


def nvmlDeviceGetHandleByIndex(index: int) -> Any:  # noqa: N802
    card = _machine()["cards"][index]
    if card.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return card


def nvmlDeviceGetUUID(handle: Any) -> str:  # noqa: N802
    return str(handle["uuid"])


def nvmlDeviceGetMigMode(handle: Any) -> list[int]:  # noqa: N802
    if handle.get("is_old"):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return [int("slices" in handle)] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle: Any) -> int:  # noqa: N802
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Any, index: int) -> Any:  # noqa: N802
    """Every second place is empty, as on a card whose slices were made and removed."""
    place, is_empty = divmod(index, 2)
    if is_empty or place >= len(handle["slices"]):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return {"uuid": handle["slices"][place], "instance": place + 1}


def nvmlDeviceGetGpuInstanceId(handle: Any) -> int:  # noqa: N802
    return int(handle["instance"])


def nvmlDeviceGetComputeInstanceId(handle: Any) -> int:  # noqa: N802
    return 0
