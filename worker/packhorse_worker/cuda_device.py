"""Whether torch finds the device that this worker was given, and if not, why."""

from __future__ import annotations

from typing import Any

from packhorse_shared.errors import CannotStartError
from packhorse_shared.nvml import read_inventory
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.place import Place


def check_cuda(torch: Any, place: Place) -> None:
    """Raises CannotStartError with one line when ``torch`` finds no device under what CUDA_VISIBLE_DEVICES says.

    Where the device was found before in this server's life it is DeviceLostError, and the worker is started again: a card that
    was lost may come back, and nobody should have to start its worker by hand.
    """
    if torch.cuda.is_available():
        if place.sighting is not None:
            place.sighting.note()
        return
    if torch.version.cuda is None:
        raise CannotStartError(
            f"devices: this PyTorch ({torch.__version__}) is built without CUDA, and device {place.device} needs it; install a "
            "CUDA build of PyTorch, or say --devices cpu"
        )
    build = f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}"
    index = f" (GPU {place.device} when the server started)" if place.uuid else ""
    may_come_back = place.sighting is not None and place.sighting.is_noted()
    raise (DeviceLostError if may_come_back else CannotStartError)(
        f"devices: {build} finds no device under CUDA_VISIBLE_DEVICES={place.visible}{index}: {_reason(torch)}; {_driver()}. "
        "Compare with nvidia-smi -L, or say --devices cpu"
    )


def _reason(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as problem:  # whatever it is, it is the reason
        return str(problem).partition("\n")[0].rstrip(". ")
    return "it gives no reason"


def _driver() -> str:
    there = read_inventory()
    return there.problem or f"the driver lists {there.count} GPU{'s' if there.count > 1 else ''}"
