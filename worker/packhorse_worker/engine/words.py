"""The words of a worker's batch as inputs: a token's id, and where the model tells segments apart, its segment above it.

A word that is none the model can read stays as it is: as an id it is outside the embedding table, which the runner refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.messages import SEGMENT_SHIFT, EncodeOptions
from packhorse_worker.engine.batch import Extra, Input

_ID_MASK = (1 << SEGMENT_SHIFT) - 1
_TYPES = "token_type_ids"


def read_words(words: Sequence[NDArray[np.int32]], options: Sequence[EncodeOptions], segments: int) -> list[Input]:
    """The inputs of a batch. ``segments`` 1: words are ids. All have the segments of their tokens with them, or none has.

    With more segments than one, ids must be below 2 ** ``SEGMENT_SHIFT``.
    """
    if segments > 1:
        joined = words[0] if len(words) == 1 else np.concatenate(words)
        types = joined >> SEGMENT_SHIFT
        if types.any():
            return _split(joined, types, options, [len(each) for each in words], segments)
    return [Input(each, option.prompt_tokens) for each, option in zip(words, options, strict=True)]


def _split(
    words: NDArray[np.int32],
    types: NDArray[np.int32],
    options: Sequence[EncodeOptions],
    lengths: list[int],
    segments: int,
) -> list[Input]:
    ids = words & _ID_MASK
    are_good = _are_within(types, segments - 1)
    inputs = []
    end = 0
    for own, option in zip(torch.split(torch.from_numpy(types.astype(np.int64)), lengths), options, strict=True):
        start, end = end, end + len(own)
        if are_good or _are_within(types[start:end], segments - 1):
            inputs.append(Input(ids[start:end], option.prompt_tokens, {_TYPES: Extra.of_tokens(own)}))
        else:
            inputs.append(Input(words[start:end], option.prompt_tokens))
    return inputs


def _are_within(values: NDArray[np.int32], most: int) -> bool:
    return int(values.min(initial=0)) >= 0 and int(values.max(initial=0)) <= most
