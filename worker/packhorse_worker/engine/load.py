"""From a model folder to a warmed-up ``Encoder``: loads the weights, finds the limits, warms up."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from packhorse_shared.errors import ModelFilesError, SettingsError
from packhorse_shared.messages import EncodeOptions, ErrorCode, ModelFacts, WorkerLimits
from packhorse_shared.settings import BatchingSettings, ModelSettings
from packhorse_worker.engine.encoder import Encoder
from packhorse_worker.engine.memory import auto_num_tokens, free_bytes
from packhorse_worker.engine.model_folder import ModelFolder, TokenLimit
from packhorse_worker.engine.modules import Dense, LayerNorm, Pooling
from packhorse_worker.engine.pipeline import Pipeline, build_parts
from packhorse_worker.engine.probe import padding_matters
from packhorse_worker.engine.tokenizer import check_tokenizer
from packhorse_worker.engine.transformer import embedding_rows, load_transformer, position_limit
from packhorse_worker.engine.weights import find_weights, fingerprint

log = logging.getLogger(__name__)

_MOST_FACTS_BYTES = 48 * 1024
"""The facts travel in one message header, which is limited."""
_CPU_WARM_UP_TOKENS = 64
"""A CPU has no kernels to choose and no allocator to fill: a full batch there would only take seconds."""


@dataclass(frozen=True)
class Device:
    """Where the model runs, and who else does."""

    torch_device: torch.device
    workers: int
    """Workers that share this device's memory, this one included."""


@dataclass(frozen=True)
class _Loaded:
    pipeline: Pipeline
    dimension: int
    dtype: torch.dtype
    num_tokens: int


def load_encoder(folder: ModelFolder, name: str, model: ModelSettings, batching: BatchingSettings, device: Device) -> Encoder:
    """Load and warm up the model of a folder that was read.

    Raises ModelFilesError or SettingsError with one line when its files or the settings cannot be served.
    """
    dtype = _dtype(model.dtype, device.torch_device)
    if model.cuda_graph_config is not None:
        log.warning("cuda_graph_config has no effect in this release: every batch runs eagerly, with the same vectors")
    log.info("loading model", extra={"model": name, "device": str(device.torch_device), "dtype": _name(dtype)})
    pipeline, dimension = _load_pipeline(folder, model, device.torch_device, dtype)
    num_tokens = _num_tokens(batching, pipeline, dtype, device)
    facts = _facts(folder, name, model, _Loaded(pipeline, dimension, dtype, num_tokens))
    limits = WorkerLimits(batching.max_batch_size, num_tokens)
    with ThreadPoolExecutor(1, "tokenizer") as meanwhile:
        check = meanwhile.submit(check_tokenizer, folder, model, facts.vocabulary_rows)
        pads = not padding_matters(pipeline, dimension, facts.max_seq_len, dtype)
        if not pads:
            log.warning("padding would change this model's vectors, so only inputs of equal length share a forward pass")
        encoder = Encoder(pipeline, facts, limits, pads=pads)
        log.info("warming up", extra={"max_seq_len": facts.max_seq_len, "max_num_tokens": num_tokens})
        warm_up(encoder, device.torch_device)
        check.result()
    return encoder


def warm_up(encoder: Encoder, device: torch.device) -> None:
    """Run representative batches, the largest first: a full one, the longest input (on a GPU), a short one.

    Raises ModelFilesError when even the short one has no vector.
    """
    most = encoder.limits.max_num_tokens if device.type == "cuda" else _CPU_WARM_UP_TOKENS
    length = max(1, min(encoder.facts.max_seq_len, most // encoder.limits.max_batch_size))
    rows = min(encoder.limits.max_batch_size, max(1, most // length))
    longest = min(encoder.facts.max_seq_len, most)
    shapes = [(rows, length), (1, longest), (1, min(8, longest))]
    for count, tokens in shapes if device.type == "cuda" else shapes[::2]:
        ids = np.arange(tokens, dtype=np.int32) % encoder.facts.vocabulary_rows
        outcome = encoder.encode([ids] * count, [EncodeOptions()] * count)
        for failure in outcome.failures[:1]:
            log.warning(
                "warm-up batch failed",
                extra={"inputs": count, "tokens": tokens, "code": failure.code.value, "error": failure.message},
            )
            if tokens <= 8 and failure.code is not ErrorCode.NON_FINITE_OUTPUT:
                raise ModelFilesError(f"the model cannot encode even {tokens} tokens: {failure.message}")


def _load_pipeline(folder: ModelFolder, model: ModelSettings, device: torch.device, dtype: torch.dtype) -> tuple[Pipeline, int]:
    transformer: Any = load_transformer(folder, model, device, dtype)
    hidden_size = int(transformer.config.get_text_config().hidden_size)
    parts, dimension = build_parts(folder, model, hidden_size)
    pooling = folder.parts[0]
    assert isinstance(pooling, Pooling), folder.parts  # the folder's reader saw to it
    pad_id = getattr(transformer.config, "pad_token_id", None)
    rows = embedding_rows(transformer)
    if not isinstance(pad_id, int) or not 0 <= pad_id < rows:
        pad_id = 0  # any row will do: pad positions are masked and never read
    return Pipeline(transformer, pooling, parts.to(device), pad_id, device), dimension


def _facts(folder: ModelFolder, name: str, model: ModelSettings, loaded: _Loaded) -> ModelFacts:
    pipeline, dimension, dtype = loaded.pipeline, loaded.dimension, _name(loaded.dtype)
    max_seq_len = find_max_seq_len(folder.limit, position_limit(pipeline.transformer), model.max_seq_len, loaded.num_tokens)
    dimensions, any_dimension = _matryoshka(folder, model, dimension)
    folders = (folder.transformer, *(part.folder for part in folder.parts if isinstance(part, Dense | LayerNorm)))
    weights = [file for each in folders for file in find_weights(each, allow_pickle=model.allow_pickle_weights)]
    served = (dtype, repr(folder.parts[0]), str(len(folder.parts)), str(model.normalize), str(max_seq_len))
    try:
        facts = ModelFacts(
            name=name,
            task="embedding",
            dimension=dimension,
            max_seq_len=max_seq_len,
            dtype=dtype,
            vocabulary_rows=pipeline.vocabulary_rows,
            matryoshka_dimensions=dimensions,
            matryoshka_any=any_dimension,
            prompts=folder.prompts,
            default_prompt_name=folder.default_prompt_name,
            lowercase=folder.lowercase,
            fingerprint=fingerprint(folder.files, weights, served),
        )
        size = len(msgspec.msgpack.encode(facts))
        msgspec.convert(msgspec.to_builtins(facts), ModelFacts)
    except msgspec.ValidationError as problem:
        raise ModelFilesError(f"{folder.path}: its files say what cannot be served: {problem}") from None
    if size > _MOST_FACTS_BYTES:
        raise ModelFilesError(
            f"{folder.path / 'config_sentence_transformers.json'}: its prompts take {size} bytes, limit {_MOST_FACTS_BYTES}"
        )
    return facts


def find_max_seq_len(declared: TokenLimit | None, positions: TokenLimit | None, asked: int | None, num_tokens: int) -> int:
    """The longest input in tokens: what was asked for, else the tighter of the model's limits, else ``num_tokens``.

    What the files declare is where sentence-transformers cuts, and may be raised up to the positions that the model has; that
    is told in one warning. Raises SettingsError when more was asked for than those.
    """
    if asked is not None and positions is not None and asked > positions.tokens:
        raise SettingsError("max_seq_len", f"{asked} is more than this model takes ({positions.tokens}, {positions.source})")
    if asked is not None and declared is not None and asked > declared.tokens:
        log.warning(
            "max_seq_len is above the limit that the model declares; what it makes of longer inputs is untried",
            extra={"max_seq_len": asked, "declared": declared.tokens, "source": declared.source},
        )
    known = [limit.tokens for limit in (declared, positions) if limit is not None]
    tokens = asked or min(known, default=num_tokens)
    if num_tokens < tokens:
        log.warning(
            "max_num_tokens is below max_seq_len, so it is the limit for one input",
            extra={"max_num_tokens": num_tokens, "max_seq_len": tokens},
        )
    return tokens


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


def _num_tokens(batching: BatchingSettings, pipeline: Pipeline, dtype: torch.dtype, device: Device) -> int:
    if batching.max_num_tokens != "auto":
        return batching.max_num_tokens
    config: Any = pipeline.transformer.config
    text_config = config.get_text_config()
    hidden = int(text_config.hidden_size)
    inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
    tokens = auto_num_tokens(free_bytes(device.torch_device, device.workers), hidden, int(inner), dtype.itemsize)
    log.info("sized max_num_tokens from free memory", extra={"max_num_tokens": tokens})
    return tokens


def _dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if asked == "float16" and device.type == "cpu":
        raise SettingsError("dtype", "float16 needs a GPU; on a CPU use float32 or bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
