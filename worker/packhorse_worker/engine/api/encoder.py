"""The Python API: ``Encoder`` loads a model once and encodes texts and token ids with it. A worker runs its batches so too."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.messages import EncodeOptions, ModelFacts, WorkerLimits
from packhorse_shared.settings import BatchingSettings, ModelSettings
from packhorse_shared.values import quoted
from packhorse_worker.backend import EncodedBatch
from packhorse_worker.engine.api.extras import Takes, ready_inputs
from packhorse_worker.engine.api.inputs import InputTypeError, OneInput, Tokens, is_single, label_of, read_inputs
from packhorse_worker.engine.api.opening import Opened, open_model
from packhorse_worker.engine.api.output import EncodeError, EncoderOutput, failures_of, joined, outputs_of
from packhorse_worker.engine.api.texts import TextReader
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.declared import Declared
from packhorse_worker.engine.files.model_folder import ModelFolder
from packhorse_worker.engine.lanes.lane import How
from packhorse_worker.engine.load import Device, load_runner
from packhorse_worker.engine.outcome import Outcome
from packhorse_worker.engine.pairs import open_pairs
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.progress import progress_bar
from packhorse_worker.engine.runner import Runner
from packhorse_worker.engine.surroundings import undisturbed
from packhorse_worker.engine.words import read_words

if TYPE_CHECKING:
    from torch import nn

    from packhorse_shared.graph_config import EncodeCudaGraphConfig

_LONG_LIST_INPUTS = 2048
"""From so many inputs on a list takes long enough for somebody to wonder."""
_CLOSED = "the encoder was shut down; make a new one"


class Encoder:
    """A model on one device: texts and token ids in, vectors or logits out. Its methods may be called from several threads.

    ``model``: a Hugging Face name or a local folder; None for the model of the ``demo`` extra. ``device``: auto (CUDA where
    there is one), cpu, cuda, cuda:1 or a torch.device. ``show_progress``: a bar on stderr; None shows it for lists of
    thousands of inputs on a terminal. ``cuda_graph_config``: an ``EncodeCudaGraphConfig``, or its arguments in a dict. All else
    is as the server's settings of the same names.

    Raises ValueError naming an argument that cannot be used, and ModelFilesError naming a file of the model that is missing
    or cannot be served.
    """

    facts: ModelFacts
    limits: WorkerLimits
    overlaps: bool

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        cuda_graph_config: EncodeCudaGraphConfig | Mapping[str, Any] | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        max_seq_len: int | None = None,
        max_num_tokens: int | Literal["auto"] = 8192,
        max_batch_size: int = 32,
        revision: str = "main",
        trust_remote_code: bool = False,
        allow_pickle_weights: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        given = {
            "model": model,
            "dtype": dtype,
            "cuda_graph_config": cuda_graph_config,
            "pooling": pooling,
            "normalize": normalize,
            "max_seq_len": max_seq_len,
            "max_num_tokens": max_num_tokens,
            "max_batch_size": max_batch_size,
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "allow_pickle_weights": allow_pickle_weights,
        }
        self._take(open_model(given, device, show_progress), show_progress)

    @classmethod
    def from_settings(
        cls, folder: ModelFolder, name: str, model: ModelSettings, batching: BatchingSettings, device: Device
    ) -> Encoder:
        """The encoder of a folder that was read: what a worker makes. Leaves threads alone. Raises as ``load_runner``."""
        encoder = cls.__new__(cls)
        encoder._take(Opened(load_runner(folder, name, model, batching, device), folder, model), show_progress=False)
        return encoder

    def _take(self, opened: Opened, show_progress: bool | None) -> None:
        runner, folder, model = opened.runner, opened.folder, opened.settings
        self._declared = None if model.cuda_graph_config is None else Declared.of(model.cuda_graph_config)
        self.facts = runner.facts
        self.limits = runner.limits
        self.overlaps = runner.lane.overlaps
        self._runner: Runner | None = runner
        self._lock = threading.Lock()
        """Held while the runner works, and to take it away."""
        types = runner.pipeline.token_types
        self._reader = TextReader(folder.path, runner.facts, lambda: open_pairs(folder, model, token_types=types))
        self._process = os.getpid()
        self._show_progress = show_progress
        self._labels = folder.labels
        self._activation = runner.pipeline.activation
        self._device = runner.pipeline.device
        self._token_types = types or None
        self._gives_tokens = runner.pipeline.is_per_token or runner.facts.task == "embedding"

    @overload
    def encode(
        self,
        inputs: OneInput,
        add_special_tokens: bool = ...,
        batch_indexed_model_output: bool = ...,
        copy_logits_to_host: bool = ...,
        return_raw_logits: Literal[False] = ...,
        **model_kwargs: Any,
    ) -> EncoderOutput: ...

    @overload
    def encode(
        self,
        inputs: Sequence[OneInput],
        add_special_tokens: bool = ...,
        batch_indexed_model_output: bool = ...,
        copy_logits_to_host: bool = ...,
        return_raw_logits: Literal[False] = ...,
        **model_kwargs: Any,
    ) -> list[EncoderOutput]: ...

    @overload
    def encode(
        self,
        inputs: OneInput | Sequence[OneInput],
        add_special_tokens: bool = ...,
        batch_indexed_model_output: bool = ...,
        copy_logits_to_host: bool = ...,
        *,
        return_raw_logits: Literal[True],
        **model_kwargs: Any,
    ) -> torch.Tensor: ...

    def encode(
        self,
        inputs: OneInput | Sequence[OneInput],
        add_special_tokens: bool = True,
        batch_indexed_model_output: bool = True,
        copy_logits_to_host: bool = True,
        return_raw_logits: bool = False,
        **model_kwargs: Any,
    ) -> EncoderOutput | list[EncoderOutput] | torch.Tensor:
        """Encode one input, or a list or tuple of any number of them.

        An input is a text, token ids (a list, tuple or array of integers, used as they are), or a dict (``PromptDict``). One
        input gives one output, a list gives a list.

        ``batch_indexed_model_output`` False gives a row for each token: (tokens, width). ``copy_logits_to_host`` False leaves
        outputs on the device. ``return_raw_logits`` gives one tensor instead, of shape (inputs, dimension) or (tokens, width).
        ``model_kwargs`` go to the model: tensors with a row for each token of the call, input by input, and constants. With a
        ``cuda_graph_config`` the tensors are those that it declares, and a call with constants runs without a graph.

        Raises ValueError naming what is wrong with an input or argument, EncodeError when inputs failed in the model, and
        RuntimeError after ``shutdown``.
        """
        runner = self._runner
        if runner is None:
            raise RuntimeError(_CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the encoder was made in process {self._process} and does not live through a fork; make a new one"
            )
        _check_switches(
            add_special_tokens=add_special_tokens,
            batch_indexed_model_output=batch_indexed_model_output,
            copy_logits_to_host=copy_logits_to_host,
            return_raw_logits=return_raw_logits,
        )
        if not (batch_indexed_model_output or self._gives_tokens):
            raise ValueError(
                "batch_indexed_model_output=False asks for a row for each token, but the output of this model "
                f"(task {self.task}) is one vector per input"
            )
        single = is_single(inputs)
        asked = read_inputs(inputs, self.facts.vocabulary_rows)
        threads = torch.get_num_threads()
        tokens = self._reader.read(asked, single=single, add_special_tokens=add_special_tokens, threads=threads)
        self._check_lengths(tokens, single=single)
        takes = self._takes(runner.pipeline)
        with undisturbed(self._device.type):
            ready, constants = ready_inputs(tokens, model_kwargs, takes)
            outcome = self._run(ready, constants, per_token=not batch_indexed_model_output, to_host=copy_logits_to_host)
        if return_raw_logits and not outcome.failures:
            return joined(outcome)
        outputs = outputs_of(asked, tokens, outcome, flat=batch_indexed_model_output)
        if outcome.failures:
            raise EncodeError(failures_of(outcome), outputs)
        found = [each for each in outputs if each is not None]
        return found[0] if single else found

    def start_batch(self, words: Sequence[NDArray[np.int32]], options: Sequence[EncodeOptions]) -> Callable[[], EncodedBatch]:
        """Encode a worker's batch; see ``Backend``."""
        inputs = read_words(words, options, self.facts.segments)
        scored = [option.scored for option in options]
        with self._lock:
            if self._runner is None:
                raise RuntimeError(_CLOSED)
            started = self._runner.start(inputs)
            if not self.overlaps:
                batch = started.outcome().encoded_batch(scored, self._activation)
                return lambda: batch
        return lambda: started.outcome().encoded_batch(scored, self._activation)

    def memory_bytes(self) -> int | None:
        """Device memory that this process holds for its models; None on a CPU."""
        runner = self._runner
        return None if runner is None else runner.memory_bytes()

    def shutdown(self) -> None:
        """Free the model, once no thread encodes any more. Calling it again does nothing."""
        with self._lock:
            if self._runner is None:
                return
            self._runner.lane.settle()
            self._runner = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def __getstate__(self) -> NoReturn:
        """Not for copying or pickling. Raises TypeError."""
        raise TypeError("an encoder cannot be copied or pickled; make one in each process that uses it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def dimension(self) -> int:
        """Size of the model's output for an input; of a token-level model's, for a token."""
        return self.facts.dimension

    @property
    def max_seq_len(self) -> int:
        """The longest input in tokens."""
        return min(self.facts.max_seq_len, self.limits.max_num_tokens)

    @property
    def task(self) -> str:
        """``embedding``, ``classify``, ``reward``, ``token_reward`` or ``rerank``."""
        return self.facts.task

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        found: torch.dtype = getattr(torch, self.facts.dtype)
        return found

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the logits, in order; () where the model has none."""
        return self._labels

    @property
    def activation(self) -> nn.Module:
        """What turns logits into the scores that the model's files mean: ``Sigmoid``, ``Identity``, ..."""
        return self._activation

    def _takes(self, pipeline: Pipeline) -> Takes:
        return Takes(pipeline.takes, self._token_types, self._device, self.dtype, pipeline.embedding_width, self._declared)

    def _check_lengths(self, tokens: Sequence[Tokens], *, single: bool) -> None:
        limit = self.max_seq_len
        for index, each in enumerate(tokens):
            if len(each.ids) > limit:
                setting = "max_seq_len" if limit == self.facts.max_seq_len else "max_num_tokens"
                raise ValueError(
                    f"{label_of(index, single=single)} has {len(each.ids)} tokens, the limit is {limit} ({setting})"
                )

    def _run(self, inputs: Sequence[Input], constants: dict[str, Any], *, per_token: bool, to_host: bool) -> Outcome:
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        bar = progress_bar("encoding", len(inputs), self._show_progress, many=_LONG_LIST_INPUTS)
        with self._lock, bar as progress, device:
            if self._runner is None:
                raise RuntimeError(_CLOSED)
            return self._runner.run(inputs, How(per_token, constants, to_host), progress=progress)


def _check_switches(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InputTypeError(f"{name}: {quoted(value)} is not allowed; give True or False")
