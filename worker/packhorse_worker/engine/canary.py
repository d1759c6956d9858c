"""The canary: a short input that every worker of a model must encode rightly, before the broker gives it a user's input.

It is a plain text as the model's own tokenizer reads it, so that a model that wants its special tokens gets them.
"""

from __future__ import annotations

import numpy as np
import torch

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.messages import MAX_CANARY_TOKENS, ErrorCode
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.model_folder import ModelFolder
from packhorse_worker.engine.runner import Runner

_TEXT = "The quick brown fox"


def find_canary(folder: ModelFolder, *, rows: int, max_seq_len: int) -> tuple[int, ...]:
    """The canary's ids, one to ``MAX_CANARY_TOKENS``: from 0 to ``rows``, exclusive. Raises ModelFilesError."""
    ids = ModelTokenizer(read_tokenizer(folder.path)).variant(lowercase=folder.lowercase).encode(_TEXT).ids
    return tuple(each for each in ids if each < rows)[: min(max_seq_len, MAX_CANARY_TOKENS)] or (0,)


def check_canary(runner: Runner) -> None:
    """Encode the canary of the model's facts. Raises ModelFilesError when that gives no finite output of the right size, and
    DeviceLostError when there is no memory for it now."""
    facts = runner.facts
    outcome = runner.run([Input(np.array(facts.canary, dtype=np.int32))])
    tokens = len(facts.canary)
    for failure in outcome.failures:
        if failure.code is ErrorCode.NON_FINITE_OUTPUT:
            raise ModelFilesError(
                f"the model's output for a plain text of {tokens} tokens is not finite in {facts.dtype}: its weights are "
                "damaged, or too large for this dtype"
            )
        problem = f"the model cannot encode even {tokens} tokens: {failure.message}"
        raise (DeviceLostError if failure.code is ErrorCode.OUT_OF_MEMORY else ModelFilesError)(problem)
    row = outcome.rows[0]
    assert isinstance(row, torch.Tensor)
    if row.shape[-1] != facts.dimension:
        raise ModelFilesError(f"the model gives vectors of {row.shape[-1]} values, but its config.json says {facts.dimension}")
