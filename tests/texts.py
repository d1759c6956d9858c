"""Texts of known length in tokens, the same in every run."""

from __future__ import annotations

import random

_WORDS = (
    "the quick brown fox jumps over a lazy dog while rain falls on green hills and old stone bridges near quiet rivers "
    "people walk with heavy bags through narrow streets in early light they talk of trade and weather and long roads"
).split()


def text_of(tokens: int, seed: int) -> str:
    """A text of that many tokens in MiniLM's vocabulary, the two special ones included: every word above is one token."""
    source = random.Random(seed)
    return " ".join(source.choice(_WORDS) for _ in range(tokens - 2))


def mixed_texts(count: int, longest: int, seed: int = 7) -> list[str]:
    """Texts whose lengths spread from 3 tokens to the longest, both included, in a shuffled order."""
    lengths = [3 + round((longest - 3) * index / (count - 1)) for index in range(count)]
    random.Random(seed).shuffle(lengths)
    return [text_of(length, seed=seed * 1_000 + index) for index, length in enumerate(lengths)]
