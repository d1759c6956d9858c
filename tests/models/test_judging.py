"""What exceptions of torch mean for a worker, in the words in which torch 2 and its libraries raise them."""

from __future__ import annotations

import pytest
import torch

from packhorse_shared.errors import CannotStartError, ModelFilesError
from packhorse_shared.messages import ErrorCode
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine import judging
from packhorse_worker.engine.judging import Verdict, device_answers, find_verdict, is_out_of_memory, judge, judge_load

BEHIND = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nFor debugging pass CUDA_LAUNCH_BLOCKING=1"
)

STICKY = [
    torch.AcceleratorError(f"CUDA error: {words}{BEHIND}")
    for words in (
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "unspecified launch failure",
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected during the execution",
        "misaligned address",
        "an illegal instruction was encountered",
        "invalid program counter",
        "operation not supported on global/shared address space",
        "hardware stack error",
        "the launch timed out and was terminated",
        "context is destroyed",
        "CUDA-capable device(s) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "invalid device ordinal",
        "unknown error",
        "an error that CUDA 14 will bring",
    )
] + [
    torch.AcceleratorError("words that torch never used before"),
    RuntimeError(f"CUDA error: device-side assert triggered{BEHIND}"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("CUDA driver error: unknown error"),
    RuntimeError("CUDA driver error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error (flash_fwd_launch_template.h:64): an illegal memory access was encountered"),
    RuntimeError("kernel.cu:12: f: block: [0,0,0], thread: [1,0,0] Assertion failed, device-side assert"),
    DeviceLostError("said before"),
]
MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB"),
    torch.AcceleratorError(f"CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual{BEHIND}"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1131, please report a bug to PyTorch'),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError(),
]
OF_THE_CALL = [
    torch.AcceleratorError(f"CUDA error: {words}{BEHIND}")
    for words in (
        "invalid argument",
        "invalid configuration argument",
        "too many resources requested for launch",
        "too many blocks in cooperative launch",
        "operation not supported",
        "operation not permitted",
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
        "operation would make the legacy stream depend on a capturing blocking stream",
        "the operation cannot be performed on the last-captured event of a capture sequence",
        "invalid resource handle",
        "no kernel image is available for execution on the device",
    )
] + [
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmStridedBatchedEx(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
]
OF_THE_MODEL = [
    ValueError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1"),
    KeyError("out of memory"),
    IndexError("index out of range in self"),
]


def words(problem: BaseException) -> str:
    return str(problem)[:60] or type(problem).__name__


@pytest.mark.parametrize("problem", STICKY, ids=words)
def test_after_these_the_process_is_done_for(problem: Exception) -> None:
    assert find_verdict(problem, lambda: True) is Verdict.DEVICE_LOST
    with pytest.raises(DeviceLostError) as raised:
        judge(problem)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is problem


@pytest.mark.parametrize("problem", MEMORY, ids=words)
def test_after_these_a_smaller_forward_may_succeed(problem: Exception) -> None:
    assert judge(problem) == (ErrorCode.OUT_OF_MEMORY, "this input does not fit into the device's memory")
    assert is_out_of_memory(problem)


@pytest.mark.parametrize("problem", OF_THE_CALL, ids=words)
def test_these_are_of_one_call_as_long_as_the_device_answers(problem: Exception) -> None:
    assert find_verdict(problem, lambda: True) is Verdict.THIS_CALL
    assert find_verdict(problem, lambda: False) is Verdict.DEVICE_LOST


@pytest.mark.parametrize("problem", OF_THE_MODEL, ids=words)
def test_these_are_no_matter_of_the_device(problem: Exception) -> None:
    assert find_verdict(problem, lambda: False) is Verdict.THIS_CALL
    code, message = judge(problem)
    assert (code, message) == (ErrorCode.FORWARD_FAILED, f"the model raised {type(problem).__name__} on this input")
    assert judge_load(problem) is None


def test_memory_that_ran_out_on_a_dead_device_is_no_reason_to_go_on() -> None:
    assert find_verdict(MEMORY[0], lambda: False) is Verdict.DEVICE_LOST


@pytest.mark.parametrize("is_cause", [True, False])
@pytest.mark.parametrize(
    ("inner", "verdict"),
    [(STICKY[0], Verdict.DEVICE_LOST), (MEMORY[0], Verdict.OUT_OF_MEMORY), (OF_THE_MODEL[0], Verdict.THIS_CALL)],
)
def test_a_model_that_wraps_an_error_hides_nothing(inner: Exception, verdict: Verdict, is_cause: bool) -> None:
    """Raised from it, or while it was handled: what the device said counts."""
    caught: list[Exception] = []
    try:
        try:
            raise inner
        except Exception:
            if is_cause:
                raise ValueError("attention failed") from inner
            raise KeyError("the fallback failed too")  # noqa: B904 (the case)
    except Exception as outer:
        caught.append(outer)
    assert find_verdict(caught[0], lambda: True) is verdict


def test_exceptions_in_a_ring_end() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert find_verdict(one) is Verdict.THIS_CALL


def test_whether_the_device_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_answers(), "a process without a context has none that is broken"

    def synchronize() -> None:
        raise problem

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    problem: Exception = STICKY[0]
    assert not device_answers()
    problem = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    assert device_answers()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert device_answers()
    monkeypatch.setattr(judging, "device_answers", lambda: False)
    assert not is_out_of_memory(MEMORY[0]), "a device that died is asked before"


@pytest.mark.parametrize(
    "problem",
    [
        torch.AcceleratorError(f"CUDA error: no kernel image is available for execution on the device{BEHIND}"),
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."),
        RuntimeError("CUDA driver error: the provided PTX was compiled with an unsupported toolchain."),
        RuntimeError("CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
    ],
    ids=words,
)
def test_a_build_that_cannot_run_on_the_card_is_told_once(problem: Exception) -> None:
    found = judge_load(problem)
    assert type(found) is CannotStartError
    assert str(found).startswith(f"devices: PyTorch {torch.__version__} for CUDA {torch.version.cuda} cannot run on this GPU")
    assert "--devices cpu" in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize("problem", [STICKY[0], MEMORY[0]], ids=words)
def test_a_load_that_failed_on_the_device_is_worth_another_try(problem: Exception) -> None:
    found = judge_load(problem)
    assert type(found) is DeviceLostError
    assert "\n" not in str(found)
    assert not isinstance(found, CannotStartError | ModelFilesError)
