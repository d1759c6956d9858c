"""What an exception from a device means: too little memory, a process that is done for, or a fault of the one call.

CUDA reports a failed kernel at some later call, and from then on answers every call with the same error: the context is gone,
and only a new process gets another. Such errors are called sticky. Sources: NVIDIA, "CUDA Runtime API", cudaError; torch's
c10/cuda/CUDAException and ATen/cuda/Exceptions.h for how the errors are worded in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import Enum

import torch

from packhorse_shared.errors import CannotStartError, PackhorseError
from packhorse_shared.messages import ErrorCode
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine.transformer import first_line


class Verdict(Enum):
    """What an exception tells of the process that it was raised in."""

    OUT_OF_MEMORY = "out of memory"
    """A smaller forward may succeed."""
    DEVICE_LOST = "device lost"
    """No further call can succeed in this process."""
    THIS_CALL = "this call"
    """Other calls may succeed."""


_MEMORY = (
    "out of memory",  # torch's allocator, cudaErrorMemoryAllocation, the driver, Triton
    "can't allocate memory",  # torch's allocator on a CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cublasCreate, where there is no room for its workspace
    "CUDNN_STATUS_ALLOC_FAILED",
    "ALLOCATION_FAILED",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "NVML_SUCCESS == r",  # torch fails to describe an out of memory where NVML does not answer
)
_OF_A_DEVICE = re.compile(
    r"(?:CUDA(?: driver)? error|CUDA Error|cuDNN error|cuFFT error|cusolver error|Triton Error \[CUDA\])(?:\s*\([^)]*\))?:\s*"
    r"(?P<reason>[^\n]*)"
)
"""How torch, its libraries and Triton begin such an error. ``reason`` is CUDA's own text, or a library's status."""
_OF_THE_CALL = re.compile(
    r"""(?:
        invalid\ (?:argument|configuration\ argument|device\ function|resource\ handle)
        | too\ many\ (?:resources\ requested\ for\ launch|blocks\ in\ cooperative\ launch)
        | operation\ not\ (?:supported|permitted)
        | no\ kernel\ image\ is\ available\ for\ execution\ on\ the\ device
        | the\ provided\ PTX\ was\ compiled\ with\ an\ unsupported\ toolchain
        | a\ PTX\ JIT\ compilation\ failed
        | device\ kernel\ image\ is\ invalid
        | CU(?:BLAS|SPARSE|SOLVER)_STATUS_(?:INVALID_VALUE|NOT_SUPPORTED|ARCH_MISMATCH)\b.*
        | CUDNN_STATUS_(?:BAD_PARAM|NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE).*
        | operation\ (?:not\ permitted\ when\ stream\ is\ capturing|failed\ due\ to\ a\ previous\ error\ during\ capture)
        | operation\ would\ .*captur.*
        | .*capture\ (?:sequence|graph).*
        | dependency\ created\ on\ uncaptured\ work\ in\ another\ stream
    )\.?""",
    re.VERBOSE,
)
"""Errors that CUDA returns for one call and leaves the context alone with. All others, known and unknown, are held to be
sticky: a worker that ends for nothing costs a reload, one that goes on with a dead context fails every batch that it gets."""
_ASSERT = "device-side assert"
_NEVER_RUNS = re.compile(
    r"no kernel image is available|unsupported toolchain|driver version is insufficient|unsupported display driver"
    r"|forward compatibility was attempted|driver on your system is too old"
)


def find_verdict(problem: BaseException, is_alive: Callable[[], bool] | None = None) -> Verdict:
    """What an exception means, those that it was raised from or while handling included.

    ``is_alive`` says whether the device still answers; it is asked before an error of CUDA's is taken for less than the end.
    """
    # What died first may be hidden behind a model's own handling of it.
    chain = list(_chain(problem))
    verdicts = {_verdict_on(each) for each in chain}
    if Verdict.DEVICE_LOST in verdicts:
        return Verdict.DEVICE_LOST
    is_of_device = Verdict.OUT_OF_MEMORY in verdicts or any(_reason(each) is not None for each in chain)
    if is_of_device and not (is_alive or device_answers)():
        return Verdict.DEVICE_LOST
    return Verdict.OUT_OF_MEMORY if Verdict.OUT_OF_MEMORY in verdicts else Verdict.THIS_CALL


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether a smaller forward may succeed."""
    return find_verdict(problem) is Verdict.OUT_OF_MEMORY


def judge(problem: Exception) -> tuple[ErrorCode, str]:
    """What a failed forward means for its inputs: a code, and what their owner is told.

    Raises DeviceLostError where no further forward can succeed.
    """
    match find_verdict(problem):
        case Verdict.OUT_OF_MEMORY:
            return ErrorCode.OUT_OF_MEMORY, "this input does not fit into the device's memory"
        case Verdict.DEVICE_LOST:
            raise DeviceLostError(f"{type(problem).__name__}: {first_line(problem)}") from problem
        case Verdict.THIS_CALL:
            # The text of an exception may quote the input, so only its type goes to the client.
            return ErrorCode.FORWARD_FAILED, f"the model raised {type(problem).__name__} on this input"


def judge_load(problem: Exception) -> PackhorseError | None:
    """What a load that failed on the device is to end with: CannotStartError where another try would fail alike,
    DeviceLostError where a new process may do better. None for what is no matter of the device."""
    said = first_line(problem) if isinstance(problem, PackhorseError) else f"{type(problem).__name__}: {first_line(problem)}"
    if any(_NEVER_RUNS.search(str(each)) for each in _chain(problem)):
        build = f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}"
        return CannotStartError(
            f"devices: {build} cannot run on this GPU with this driver ({said}); install a build of PyTorch for them, or say "
            "--devices cpu"
        )
    match find_verdict(problem):
        case Verdict.OUT_OF_MEMORY:
            return DeviceLostError(f"the model does not fit into the memory that is free on the device ({said})")
        case Verdict.DEVICE_LOST:
            return DeviceLostError(said)
        case Verdict.THIS_CALL:
            return None


def device_answers() -> bool:
    """Whether the CUDA context of this process, if it has one, still works."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        return _verdict_on(problem) is Verdict.THIS_CALL
    return True


def _verdict_on(problem: BaseException) -> Verdict:
    """An exception by its own type and text. Only RuntimeError and MemoryError come from a device."""
    text = str(problem)
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return Verdict.OUT_OF_MEMORY
    if isinstance(problem, DeviceLostError):
        return Verdict.DEVICE_LOST
    if not isinstance(problem, RuntimeError):
        return Verdict.THIS_CALL
    if any(mark in text for mark in _MEMORY):
        return Verdict.OUT_OF_MEMORY
    reason = _reason(problem)
    if reason is None:
        return Verdict.DEVICE_LOST if _ASSERT in text else Verdict.THIS_CALL
    return Verdict.THIS_CALL if _OF_THE_CALL.fullmatch(reason) else Verdict.DEVICE_LOST


def _reason(problem: BaseException) -> str | None:
    """CUDA's own words in an exception; None where it has none."""
    if not isinstance(problem, RuntimeError):
        return None
    found = _OF_A_DEVICE.search(str(problem))
    if found is not None:
        return found["reason"].strip()
    return str(problem).partition("\n")[0] if isinstance(problem, torch.AcceleratorError) else None


def _chain(problem: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
