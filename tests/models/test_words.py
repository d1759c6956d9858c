"""The words of a batch as a worker reads them: ids, segments, and words that no frontend would make."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse import Encoder
from packhorse_shared.messages import SEGMENT_SHIFT, EncodeOptions
from packhorse_worker.engine.words import read_words
from tiny_heads import build_cross_encoder
from tiny_models import build_t

SEGMENT = 1 << SEGMENT_SHIFT
PLAIN = [2, 10, 3, 11, 3]
PAIR = [2, 10, 3, SEGMENT + 11, SEGMENT + 3]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    with Encoder(build_cross_encoder(tmp_path_factory.mktemp("models") / "model", "new")) as found:
        yield found


def arrays(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(each, dtype=np.int32) for each in lists]


def test_segments_reach_the_model(encoder: Encoder) -> None:
    """In a batch with inputs that have none, each gets what it gets alone."""
    pair, plain, again = encoder.start_batch(arrays(PAIR, PLAIN, PAIR), [EncodeOptions()] * 3)().values
    types = torch.tensor([0, 0, 0, 1, 1])
    expected = [encoder.encode(PLAIN, token_type_ids=types).logits, encoder.encode(PLAIN).logits]
    np.testing.assert_allclose([pair, plain, again], [float(expected[0]), float(expected[1]), float(expected[0])], atol=1e-5)
    assert abs(pair - plain) > 1e-3


HOSTILE = {
    "segment 2 of 2": [2, 10, 2 * SEGMENT + 11, 3],
    "segment 127": [2, 127 * SEGMENT + 11, 3],
    "negative": [2, -1, 3],
    "most negative": [-(1 << 31)],
    "an id outside the table": [2, SEGMENT - 1, 3],
    "an id outside the table, in a segment": [2, SEGMENT + 128, 3],
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("scored", [True, False])
def test_words_that_no_frontend_makes_fail_alone(encoder: Encoder, name: str, *, scored: bool) -> None:
    batch = encoder.start_batch(arrays(PAIR, HOSTILE[name], PLAIN), [EncodeOptions(scored=scored)] * 3)()
    assert [(each.index, each.message) for each in batch.failures] == [
        (1, "token ids must be one or more from 0 to 127, in segments 0 to 1")
    ]
    assert batch.row_values == [1, 0, 1]
    alone = encoder.start_batch(arrays(PAIR, PLAIN), [EncodeOptions(scored=scored)] * 2)()
    np.testing.assert_allclose(batch.values, alone.values, atol=1e-6)


def test_a_batch_of_which_nothing_can_be_read(encoder: Encoder) -> None:
    batch = encoder.start_batch(arrays([-5], [5 * SEGMENT]), [EncodeOptions(scored=True)] * 2)()
    assert [each.index for each in batch.failures] == [0, 1]
    assert len(batch.values) == 0


def test_without_segments_a_word_is_the_id(tmp_path: Path) -> None:
    """An embedding table may have more rows than fit below a segment."""
    large = SEGMENT + 5
    [read] = read_words(arrays([2, large]), [EncodeOptions(prompt_tokens=1)], 1)
    assert (read.ids.tolist(), read.prompt_tokens, read.extras) == ([2, large], 1, {})
    with Encoder(build_t(tmp_path / "t")) as embedder:
        batch = embedder.start_batch(arrays([2, 10, 3], PAIR), [EncodeOptions()] * 2)()
    assert [(each.index, each.message) for each in batch.failures] == [(1, "token ids must be one or more from 0 to 127")]


def test_a_batch_of_texts_alone_carries_no_segments() -> None:
    """Nothing is split, and the forward gets no tensor more than before."""
    words = arrays(PLAIN, [2, 3])
    read = read_words(words, [EncodeOptions(2), EncodeOptions()], 2)
    assert [each.ids is own for each, own in zip(read, words, strict=True)] == [True, True]
    assert [(each.prompt_tokens, each.extras) for each in read] == [(2, {}), (0, {})]
    assert [sorted(each.extras) for each in read_words(arrays(PLAIN, PAIR), [EncodeOptions()] * 2, 2)] == [
        ["token_type_ids"]
    ] * 2
