"""Whether torch finds the device that this worker was given, and if not, why."""

from __future__ import annotations

from typing import Any

from packhorse_shared.errors import CannotStartError
from packhorse_shared.nvml import read_inventory
from packhorse_worker.backend import DeviceLostError


def check_cuda(torch: Any, word: str, *, was_cut_off: bool) -> None:
    """Raises CannotStartError with one line when ``torch`` finds no device under ``word``, which CUDA_VISIBLE_DEVICES holds.

    ``was_cut_off``: the start before this one did not end well. Then it is DeviceLostError where a card may be missing, and the
    worker is started again: a card that was lost may come back, and nobody should have to start its worker by hand.
    """
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise CannotStartError(
            f"devices: this PyTorch ({torch.__version__}) is built without CUDA, and device {word} needs it; install a CUDA "
            "build of PyTorch, or say --devices cpu"
        )
    build = f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}"
    raise (DeviceLostError if was_cut_off else CannotStartError)(
        f"devices: {build} finds no device under CUDA_VISIBLE_DEVICES={word}: {_reason(torch)}; {_driver()}. Compare with "
        "nvidia-smi -L, or say --devices cpu"
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
