"""The limits of a loaded model: tokens of one input, and of one forward."""

from __future__ import annotations

import logging
from typing import Any

import torch

from packhorse_shared.errors import SettingsError
from packhorse_shared.messages import ModelFacts
from packhorse_shared.settings import BatchingSettings
from packhorse_worker.engine.files.model_folder import TokenLimit
from packhorse_worker.engine.measuring import CudaGauge, Limits, measure
from packhorse_worker.engine.memory import MOST_TOKENS, SHARE_OF_FREE, auto_num_tokens, free_bytes
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.tuning import choose

log = logging.getLogger(__name__)


def most_num_tokens(batching: BatchingSettings) -> int:
    """The most that ``max_num_tokens`` can turn out to be on any device."""
    return MOST_TOKENS if batching.max_num_tokens == "auto" else batching.max_num_tokens


def find_max_seq_len(declared: TokenLimit | None, positions: TokenLimit | None, asked: int | None, most_tokens: int) -> int:
    """The longest input in tokens: what was asked for, else the tighter of the model's limits, else ``most_tokens``. That may
    not depend on what this device has room for: workers that differ there would pass for workers of other models.

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
    return asked or min(known, default=most_tokens)


def find_num_tokens(
    batching: BatchingSettings, transformer: Any, pipeline: Pipeline, facts: ModelFacts, workers_on_device: int
) -> int:
    """Tokens of one forward: the setting, or for ``auto`` what this device has memory for and use of.

    One warning where they are fewer than the longest input has. Raises DeviceLostError when the process must end.
    """
    tokens = batching.max_num_tokens
    if tokens == "auto":
        tokens = _auto(batching.max_batch_size, transformer, pipeline, facts, workers_on_device)
    if tokens < facts.max_seq_len:
        log.warning(
            "max_num_tokens is below max_seq_len, so it is the limit for one input",
            extra={"max_num_tokens": tokens, "max_seq_len": facts.max_seq_len},
        )
    return tokens


def _auto(max_batch_size: int, transformer: Any, pipeline: Pipeline, facts: ModelFacts, workers_on_device: int) -> int:
    """A CPU runs forwards of its own size whatever a batch holds, and nothing counts its memory: there the rule does."""
    device = pipeline.device
    reason = "by rule from free memory"
    if device.type == "cuda":
        gauge = CudaGauge(device)
        gauge.forget()  # so that it counts as free
        share = free_bytes(device, workers_on_device)
        samples = measure(pipeline.forward, Limits(max_batch_size, facts.max_seq_len, facts.vocabulary_rows, share), gauge)
        if samples.typical:
            choice = choose(samples, int(share * SHARE_OF_FREE), facts.max_seq_len)
            log.info("max_num_tokens auto: %d tokens (%s)", choice.tokens, choice.reason)
            return choice.tokens
        reason += f", since measuring ended: {samples.ended}"
    config = transformer.config.get_text_config()
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    value_bytes = getattr(torch, facts.dtype).itemsize
    tokens = auto_num_tokens(free_bytes(device, workers_on_device), hidden, inner, value_bytes)
    log.info("max_num_tokens auto: %d tokens (%s)", tokens, reason)
    return tokens
