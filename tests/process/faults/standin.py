"""Packhorse with a model that is none, so that faults can be tried in milliseconds: ``python standin.py worker --slot 0``.

All of the worker is the real one (sockets, beats, brake, exit statuses) but for what it loads: a stand-in that needs no torch,
takes exactly as long as it is told, answers every input with a row that only this input has, and falls into traps. The
other commands are the real ones. ``standin_stack.py`` starts a server of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

DIMENSION = 8
CANARY = (2, 10, 3)
FOLDER_VARIABLE = "STANDIN_RUN_DIR"
"""Environment variable: where the files of the stand-ins are. Nobody of Packhorse looks at it."""
TRAPS_NAME = "standin.json"
"""``Traps`` as JSON, looked at before every batch."""
LOST_NAME = "lose-the-device"
"""A file that the next batch takes away, and its worker's device is lost then."""
MISSING_NAME = "miss-the-device"
"""While there is a file of this name, CUDA finds none of the devices."""
_LIBC = ctypes.CDLL(None)
_LIBC.getenv.restype = ctypes.c_char_p
_HANG_S = 600.0
_SIXTEEN_BITS = 0xFFFF


class Traps(msgspec.Struct, frozen=True, kw_only=True):
    """How the stand-in behaves. Ids are token ids: "t90" is 90."""

    batch_s: float = 0.002
    """Seconds that every batch takes, and more for each input and token."""
    input_s: float = 0.0
    token_s: float = 0.0
    kill: tuple[int, ...] = ()
    """Ids that end the process with SIGKILL in the middle of their batch."""
    hang: tuple[int, ...] = ()
    """Ids whose batch does not return."""
    raises_every: int = 0
    """Of so many batches one raises as a whole; 0 is none. The canary never does."""
    dimension: int = DIMENSION
    """A multiple of ``DIMENSION``: rows are ``row_of`` over and over. Looked at when a worker loads."""
    load_s: float = 0.0
    is_reranker: bool = False
    """Whether it scores pairs of texts (``score_of``). Looked at when a worker loads."""
    logs_ids: bool = True
    """Whether the ids of what is computed are noted, or only how many inputs."""


class Computed(msgspec.Struct, frozen=True):
    """One batch that a worker began; one line of ``computed-PID.log``."""

    began: float
    """On the machine's monotonic clock."""
    pid: int
    inputs: int
    ids: list[list[int]] = []


class Seen(msgspec.Struct, frozen=True):
    """What a worker's process may see when it would import torch: ``seen-SLOT-PID.json``. None is for what is not set."""

    slot: int
    pid: int
    visible: str | None
    order: str | None
    threads: str | None
    has_torch: bool


def row_of(ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float32]:
    """The row that the stand-in gives for these ids, float32 (8,): whole numbers below 2**24, so exact."""
    array = np.asarray(ids, dtype="<i4")
    once, twice = zlib.crc32(array.tobytes()), zlib.crc32(array.tobytes()[::-1], 0x5A5A5A5A)
    hashes = [once & _SIXTEEN_BITS, once >> 16, twice & _SIXTEEN_BITS, twice >> 16]
    return np.array([array.size, array.sum(), array[0], array[-1], *hashes], dtype=np.float32)


def score_of(words: Sequence[int] | NDArray[np.int32], *, is_scored: bool) -> float:
    """What a stand-in for a reranker gives for these words, exactly: below 1 as a score, from 2 to 3 as a logit."""
    score = (zlib.crc32(np.asarray(words, dtype="<i4").tobytes()) & _SIXTEEN_BITS) / (_SIXTEEN_BITS + 1)
    return score if is_scored else score + 2


def facts_of(name: str, traps: Traps | None = None) -> Any:
    """The ``ModelFacts`` of the stand-in: those of the tiny model whose tokenizer the frontends use."""
    from packhorse_shared.messages import ModelFacts

    is_reranker, dimension = (traps.is_reranker, traps.dimension) if traps else (False, DIMENSION)
    return ModelFacts(
        name=name,
        task="rerank" if is_reranker else "embedding",
        dimension=1 if is_reranker else dimension,
        segments=2 if is_reranker else 1,
        max_seq_len=64,
        dtype="float32",
        vocabulary_rows=128,
        canary=CANARY,
        fingerprint="stand-in",
    )


class StandIn:
    """A ``Backend`` without torch."""

    overlaps = False

    def __init__(self, facts: Any, limits: Any, folder: Path) -> None:
        self.facts = facts
        self.limits = limits
        self._folder = folder
        self._traps_path = folder / TRAPS_NAME
        self._traps_seen = -1
        self._traps = Traps()
        self._batches = 0
        log = folder / f"computed-{os.getpid()}.log"
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def start_batch(self, ids: Sequence[NDArray[np.int32]], options: Sequence[Any]) -> Callable[[], Any]:
        from packhorse_worker.backend import DeviceLostError, EncodedBatch

        began = time.monotonic()
        traps = self.traps()
        self._note(began, ids, traps)
        tokens = np.concatenate(ids)
        takes_s = traps.batch_s + traps.input_s * len(ids) + traps.token_s * tokens.size
        if np.isin(tokens, traps.kill).any():
            time.sleep(takes_s / 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if np.isin(tokens, traps.hang).any():
            time.sleep(_HANG_S)
        if tokens.tolist() != list(CANARY) and (self._folder / LOST_NAME).exists():
            (self._folder / LOST_NAME).unlink()
            raise DeviceLostError("AcceleratorError: CUDA error: an illegal memory access was encountered")
        rows = np.concatenate([self._row(each, option.scored) for each, option in zip(ids, options, strict=True)])
        ends = began + takes_s
        time.sleep(max(0.0, ends - time.monotonic()))
        if traps.raises_every and tokens.tolist() != list(CANARY):
            self._batches += 1
            if self._batches % traps.raises_every == 0:
                raise RuntimeError("the stand-in does not like every batch")
        batch = EncodedBatch(rows, [self.facts.dimension] * len(ids), [])
        return lambda: batch

    def _row(self, words: NDArray[np.int32], is_scored: bool) -> NDArray[np.float32]:
        if self.facts.task == "rerank":
            return np.array([score_of(words, is_scored=is_scored)], dtype=np.float32)
        return np.tile(row_of(words), self.facts.dimension // DIMENSION)

    def memory_bytes(self) -> int | None:
        return None

    def traps(self) -> Traps:
        """As the file says now."""
        try:
            written = self._traps_path.stat().st_mtime_ns
            if written != self._traps_seen:
                self._traps = msgspec.json.decode(self._traps_path.read_bytes(), type=Traps)
                self._traps_seen = written
        except FileNotFoundError:
            pass
        return self._traps

    def _note(self, began: float, ids: Sequence[NDArray[np.int32]], traps: Traps) -> None:
        noted = Computed(began, os.getpid(), len(ids), [each.tolist() for each in ids] if traps.logs_ids else [])
        with contextlib.suppress(OSError):  # a full disk: what is tested then is not what was computed
            os.write(self._log, msgspec.json.encode(noted) + b"\n")


def _note_seen(slot: int, folder: Path) -> None:
    """As the libraries of a driver look: not by Python's copy of the environment, but by C's own."""

    def seen(name: str) -> str | None:
        found: bytes | None = _LIBC.getenv(name.encode())
        return None if found is None else found.decode()

    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
    found = Seen(slot, os.getpid(), *map(seen, names), has_torch="torch" in sys.modules)
    with contextlib.suppress(OSError):  # a full disk
        (folder / f"seen-{slot}-{os.getpid()}.json").write_bytes(msgspec.json.encode(found))


def _torch(folder: Path) -> Any:
    """As much of torch as is asked whether it finds a device."""

    def init() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    cuda = SimpleNamespace(is_available=lambda: not (folder / MISSING_NAME).exists(), init=init)
    return SimpleNamespace(__version__="0.stand-in", version=SimpleNamespace(cuda="13.0"), cuda=cuda)


def _load(settings: Any, place: Any) -> StandIn:
    """Takes the place of ``packhorse_worker.__main__._load``."""
    from packhorse_shared.devices import CPU
    from packhorse_shared.messages import WorkerLimits
    from packhorse_shared.model_folder import served_names
    from packhorse_worker.cuda_device import check_cuda

    most_tokens = settings.batching.max_num_tokens
    limits = WorkerLimits(settings.batching.max_batch_size, most_tokens if isinstance(most_tokens, int) else 8192)
    folder = Path(os.environ[FOLDER_VARIABLE])
    _note_seen(place.slot, folder)
    if place.device != CPU:
        check_cuda(_torch(folder), place)
    standin = StandIn(None, limits, folder)
    traps = standin.traps()
    standin.facts = facts_of(served_names(settings.model)[0], traps)
    time.sleep(traps.load_s)
    return standin


def main(argv: list[str]) -> int:
    """Run one command of packhorse."""
    from packhorse.cli import main as run

    if argv[:1] == ["worker"]:
        import packhorse_worker.__main__ as worker

        worker._load = _load  # type: ignore[assignment]
    if argv[:1] == ["embeddings"]:
        # The launcher puts the folder of its interpreter first on PATH: ours, whose `packhorse` is this file.
        sys.executable = str(Path(os.environ["PATH"].split(os.pathsep)[0]) / "python")
    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
