"""Tries a freshly loaded pipeline out: does padding leave its vectors alone, and are they of the size that its files say?

Most models mask pad tokens well. A few cannot (FNet mixes all positions, ConvBERT's convolutions reach over the end), and no
flag of the library says which, so it is measured.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_SHORT_TOKENS = 4
_LONG_TOKENS = 13
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference that rounding may make, as a share of the vector's largest value. Pad tokens that leak make more than
that: most of an input as short as this one is its edge."""


def padding_matters(pipeline: Pipeline, dimension: int, max_seq_len: int, dtype: torch.dtype) -> bool:
    """Whether an input's vector changes when it is padded to the length of a longer one.

    Raises ModelFilesError when the vectors are not of size ``dimension``.
    """
    short = _ids(min(_SHORT_TOKENS, max_seq_len), pipeline.vocabulary_rows)
    long = _ids(min(_LONG_TOKENS, max_seq_len), pipeline.vocabulary_rows)
    try:
        alone = pipeline.forward([short], [0])[0]
        beside = pipeline.forward([short, long], [0, 0])[0]
    except Exception as problem:
        # The warm-up tells whether the model works at all; if it does, then without padding.
        log.warning("a padded batch failed", extra={"error": f"{type(problem).__name__}: {first_line(problem)}"})
        return True
    if len(alone) != dimension:
        raise ModelFilesError(f"the model gives vectors of {len(alone)} values, but its config.json says {dimension}")
    if not np.isfinite(alone).all():
        return False  # nothing can be told from it, and each input is checked for it anyway
    return bool(np.abs(alone - beside).max() > _TOLERANCES[dtype] * np.abs(alone).max())


def _ids(count: int, rows: int) -> NDArray[np.int32]:
    """Ids from the end of the vocabulary: special tokens stand at its beginning, and models may treat them apart."""
    return (rows - 1 - np.arange(count, dtype=np.int32)) % rows
