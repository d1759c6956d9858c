"""From a model folder to a warmed-up ``Runner``: loads the weights, finds the limits, warms up."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from packhorse_shared.errors import ModelFilesError, SettingsError
from packhorse_shared.graph_config import read_graph_config
from packhorse_shared.messages import ModelFacts, Probabilities, WorkerLimits
from packhorse_shared.settings import BatchingSettings, ModelSettings
from packhorse_worker.engine.attention.ways import ways_for
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.canary import check_canary, find_canary
from packhorse_worker.engine.declared import Declared
from packhorse_worker.engine.files.labels import told
from packhorse_worker.engine.files.model_folder import ModelFolder
from packhorse_worker.engine.files.modules import Dense, LayerNorm, Pooling, SequenceHead, TokenHead, YesNoHead
from packhorse_worker.engine.files.probabilities import read_probabilities
from packhorse_worker.engine.files.weights import find_weights, fingerprint
from packhorse_worker.engine.forward import Arguments
from packhorse_worker.engine.graphs.equipping import check_number, equip
from packhorse_worker.engine.grouping import Grouping, grouping_of
from packhorse_worker.engine.heads import Embedding, Readout, SequenceLogits, TokenLogits, YesNoLogits
from packhorse_worker.engine.lanes.lane import DirectLane, Lane, QueuedLane
from packhorse_worker.engine.lanes.queues import CudaQueues
from packhorse_worker.engine.limits import find_max_seq_len, find_num_tokens, most_num_tokens
from packhorse_worker.engine.parts import build_parts
from packhorse_worker.engine.pipeline import Pipeline, Sizes
from packhorse_worker.engine.prepack import prepack_linears
from packhorse_worker.engine.probe import Probe
from packhorse_worker.engine.runner import Runner
from packhorse_worker.engine.tokenizer import check_tokenizer
from packhorse_worker.engine.transformer import embedding_shape, load_transformer, position_limit

log = logging.getLogger(__name__)

_MOST_FACTS_BYTES = 48 * 1024
"""The facts travel in one message header, which is limited."""
_CPU_WARM_UP_TOKENS = 64
"""A CPU has no kernels to choose and no allocator to fill: a full batch there would only take seconds."""
_CPU_TYPICAL_TOKENS = 1024
"""Tokens of the forwards that linear layers are packed for."""


@dataclass(frozen=True)
class Device:
    """Where the model runs, and who else does."""

    torch_device: torch.device
    workers: int
    """Workers that share this device's memory, this one included."""


@dataclass(frozen=True)
class _Sizes:
    """What limits and describes a loaded model."""

    max_seq_len: int
    vocabulary_rows: int
    dimension: int
    dtype: torch.dtype


def load_runner(
    folder: ModelFolder,
    name: str,
    model: ModelSettings,
    batching: BatchingSettings,
    device: Device,
    *,
    show_progress: bool | None = False,
) -> Runner:
    """Load and warm up the model of a folder that was read. ``show_progress``: a bar on stderr while CUDA graphs are captured;
    None shows it on a terminal.

    Raises ModelFilesError or SettingsError with one line when its files or the settings cannot be served.
    """
    dtype = _dtype(model.dtype, device.torch_device)
    log.info("loading model", extra={"model": name, "device": str(device.torch_device), "dtype": _name(dtype)})
    transformer: Any = load_transformer(folder, model, device.torch_device, dtype)
    hidden_size = int(transformer.config.get_text_config().hidden_size)
    parts, dimension = build_parts(folder, model, hidden_size)
    positions = position_limit(transformer)
    max_seq_len = find_max_seq_len(folder.limit, positions, model.max_seq_len, most_num_tokens(batching))
    sizes = _Sizes(max_seq_len, embedding_shape(transformer)[0], dimension, dtype)
    canary = find_canary(folder, rows=sizes.vocabulary_rows, max_seq_len=max_seq_len)
    facts = _facts(folder, name, model, sizes, canary)
    with ThreadPoolExecutor(1, "tokenizer") as meanwhile:
        token_types = Arguments(transformer.base_model).token_types
        check = meanwhile.submit(check_tokenizer, folder, model, facts.vocabulary_rows, token_types)
        pipeline, grouping = _assemble(folder, transformer, parts, facts, device=device.torch_device)
        facts = check.result().put_into(facts, _MOST_FACTS_BYTES)
    if model.cuda_graph_config is not None:
        Declared.of(model.cuda_graph_config).check_taken(pipeline.takes, pipeline.embedding_width)
    num_tokens = find_num_tokens(batching, transformer, pipeline, facts, device.workers)
    runner = Runner(pipeline, _lane(pipeline), facts, WorkerLimits(batching.max_batch_size, num_tokens), grouping)
    if model.cuda_graph_config is not None:
        check_number(runner, read_graph_config(model.cuda_graph_config))  # before anything runs
    log.info("warming up", extra={"max_seq_len": max_seq_len, "max_num_tokens": num_tokens})
    warm_up(runner)
    if model.cuda_graph_config is not None:
        equip(runner, read_graph_config(model.cuda_graph_config), show_progress=show_progress)
        warm_up(runner)  # capturing gives back what eager forwards held: no request shall be the first to ask for it again
    check_canary(runner)
    return runner


def _lane(pipeline: Pipeline) -> Lane:
    if pipeline.device.type == "cpu":
        return DirectLane(pipeline)
    return QueuedLane(pipeline, CudaQueues(pipeline.device))


def _assemble(
    folder: ModelFolder, transformer: Any, parts: nn.Sequential, facts: ModelFacts, *, device: torch.device
) -> tuple[Pipeline, Grouping]:
    """Find out how the model's forwards can be run, and make them fast."""
    probe = Probe(transformer, facts.vocabulary_rows, facts.max_seq_len, _pad_id(transformer, facts), device)
    manner = probe.find_manner(ways_for(device, getattr(torch, facts.dtype)))
    log.info("batches run %s", manner.name)
    readout = _readout(folder, transformer, parts.to(device), probe, device)
    activation = getattr(nn, folder.activation)()
    hidden_size = int(transformer.config.get_text_config().hidden_size)
    pipeline = Pipeline(
        manner.forward, readout, Sizes(facts.dimension, hidden_size, embedding_shape(transformer)[1]), activation, device
    )
    if device.type == "cpu":
        works = probe.check_of(pipeline.forward)
        replaced = prepack_linears(transformer, getattr(torch, facts.dtype), _CPU_TYPICAL_TOKENS, works)
        log.debug("linear layers run on oneDNN", extra={"layers": replaced})
    return pipeline, grouping_of(device.type, is_packed=manner.forward.is_packed, pads=manner.pads)


def _readout(folder: ModelFolder, transformer: Any, parts: nn.Sequential, probe: Probe, device: torch.device) -> Readout:
    match folder.head:
        case None:
            pooling = folder.parts[0]
            assert isinstance(pooling, Pooling), folder.parts  # the folder's reader saw to it
            return Embedding(pooling, parts, in_parts=device.type == "cuda")
        case SequenceHead():
            return SequenceLogits(transformer, probe.find_gather(getattr(transformer.config, "pad_token_id", None)))
        case TokenHead():
            return probe.checked(TokenLogits(transformer))
        case YesNoHead():
            return YesNoLogits(transformer, folder.head)


def _pad_id(transformer: Any, facts: ModelFacts) -> int:
    """Any row will do where the model names none: pad positions are masked and never read."""
    pad_id = getattr(transformer.config, "pad_token_id", None)
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < facts.vocabulary_rows else 0


def warm_up(runner: Runner) -> None:
    """Run representative batches, the largest first: a full one, and on a GPU the longest input. One that fails only warns."""
    facts, limits = runner.facts, runner.limits
    on_gpu = runner.pipeline.device.type == "cuda"
    most = limits.max_num_tokens if on_gpu else _CPU_WARM_UP_TOKENS
    length = max(1, min(facts.max_seq_len, most // limits.max_batch_size))
    rows = min(limits.max_batch_size, max(1, most // length))
    shapes = [(rows, length), (1, min(facts.max_seq_len, most))]
    for count, tokens in shapes if on_gpu else shapes[:1]:
        outcome = runner.run([Input(np.arange(tokens, dtype=np.int32) % facts.vocabulary_rows)] * count)
        for failure in outcome.failures[:1]:
            log.warning(
                "warm-up batch failed",
                extra={"inputs": count, "tokens": tokens, "code": failure.code.value, "error": failure.message},
            )


def _facts(folder: ModelFolder, name: str, model: ModelSettings, sizes: _Sizes, canary: tuple[int, ...]) -> ModelFacts:
    dimensions, any_dimension = _matryoshka(folder, model, sizes.dimension)
    folders = (folder.transformer, *(part.folder for part in folder.parts if isinstance(part, Dense | LayerNorm)))
    weights = [file for each in folders for file in find_weights(each, allow_pickle=model.allow_pickle_weights)]
    dtype = _name(sizes.dtype)
    way = (repr(folder.head or folder.parts[0]), folder.activation, str(len(folder.parts)), str(model.normalize))
    served = (dtype, *way, str(sizes.max_seq_len))
    try:
        facts = ModelFacts(
            name=name,
            task=folder.task,
            dimension=sizes.dimension,
            max_seq_len=sizes.max_seq_len,
            dtype=dtype,
            vocabulary_rows=sizes.vocabulary_rows,
            matryoshka_dimensions=dimensions,
            matryoshka_any=any_dimension,
            labels=told(folder.labels),
            activation=folder.activation,
            probabilities=_probabilities(folder),
            prompts=folder.prompts,
            default_prompt_name=folder.default_prompt_name,
            lowercase=folder.lowercase,
            canary=canary,
            fingerprint=fingerprint(folder.files, weights, served),
        )
        size = len(msgspec.msgpack.encode(facts))
        msgspec.convert(msgspec.to_builtins(facts), ModelFacts)
    except (msgspec.ValidationError, UnicodeEncodeError) as problem:
        raise ModelFilesError(f"{folder.path}: its files say what cannot be served: {problem}") from None
    if size > _MOST_FACTS_BYTES:
        raise ModelFilesError(
            f"{folder.path / 'config_sentence_transformers.json'}: its prompts take {size} bytes, limit {_MOST_FACTS_BYTES}"
        )
    return facts


def _probabilities(folder: ModelFolder) -> Probabilities:
    if folder.task in ("embedding", "token_reward") or not folder.labels:
        return "none"
    return read_probabilities({**folder.config, **folder.config_kwargs}, len(folder.labels))


def _matryoshka(folder: ModelFolder, model: ModelSettings, dimension: int) -> tuple[tuple[int, ...], bool]:
    """Sizes that ``dimensions`` may ask for: the setting, else what the model declares."""
    if not model.matryoshka_dimensions:
        return tuple(each for each in folder.matryoshka_dimensions if each <= dimension), folder.matryoshka_any
    if model.matryoshka_dimensions == ("any",):
        return (), True
    sizes: list[int] = []
    for word in model.matryoshka_dimensions:
        if not word.isdecimal() or not 1 <= int(word) <= dimension:
            raise SettingsError("matryoshka_dimensions", f"{word} is not a size from 1 to {dimension}, nor any by itself")
        sizes.append(int(word))
    return tuple(sizes), False


def _dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if asked == "float16" and device.type == "cpu":
        raise SettingsError("dtype", "float16 needs a GPU; on a CPU use float32 or bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
