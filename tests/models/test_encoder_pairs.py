"""Pairs of texts through ``Encoder.encode``, against sentence-transformers' CrossEncoder, one pair at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import Encoder
from tiny_heads import build_causal_reranker, build_cross_encoder, build_head

PAIRS = [("t10 t11", "t12 t13 t14"), ("t15", "t16"), ("t10 t11", "t17 t18 t19 t20 t21"), ("t22 t23 t24", "")]


def reference_scores(folder: Path, activation: Any = None) -> torch.Tensor:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    scores = [model.predict([pair], activation_fn=activation, show_progress_bar=False)[0] for pair in PAIRS]
    return torch.from_numpy(np.stack(scores)).float()


def questions() -> list[Any]:
    return [{"prompt": query, "text_pair": document} for query, document in PAIRS]


@pytest.mark.parametrize("build", [lambda folder: build_cross_encoder(folder, "new"), build_causal_reranker])
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, build: Any) -> None:
    folder = build(tmp_path)
    expected = reference_scores(folder)
    with Encoder(folder, max_batch_size=2) as encoder:
        assert encoder.task == "rerank"
        outputs = encoder.encode(questions())
        scores = encoder.activation(torch.cat([each.logits for each in outputs]))
        alone = encoder.encode(questions()[0])
        assert alone.logits.shape == (1,)
        assert alone.prompt == "t10 t11"
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_pairs_beside_texts_and_ids(tmp_path: Path) -> None:
    """Only pairs have token types of their own; in one call every input is given some."""
    with Encoder(build_cross_encoder(tmp_path, "up to 5.3")) as encoder:
        pair, text, ids = encoder.encode([questions()[0], "t10 t11", [2, 10, 11, 3]])
        assert pair.prompt_token_ids == [2, 10, 11, 3, 12, 13, 14, 3]
        torch.testing.assert_close(text.logits, ids.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(text.logits, encoder.encode("t10 t11").logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(pair.logits, encoder.encode(questions()[0]).logits, rtol=0, atol=1e-5)
        types = torch.zeros(len(pair.prompt_token_ids), dtype=torch.int64)
        untyped = encoder.encode(pair.prompt_token_ids).logits
        torch.testing.assert_close(encoder.encode(questions()[0], token_type_ids=types).logits, untyped, rtol=0, atol=1e-5)
        assert not torch.allclose(pair.logits, untyped, atol=1e-3)


def test_a_prompt_of_the_model(tmp_path: Path) -> None:
    with Encoder(build_causal_reranker(tmp_path)) as encoder:
        by_default, named, plain = encoder.encode(
            [questions()[1], {**questions()[1], "prompt_name": "code"}, "t15"],
        )
    assert by_default.prompt_token_ids == [40, 20, 21, 41, 15, 42, 16, 43, 44]
    assert named.prompt_token_ids == [40, 22, 41, 15, 42, 16, 43, 44]
    assert plain.prompt_token_ids == [15, 3]


def test_what_is_refused(tmp_path: Path) -> None:
    with Encoder(build_head(tmp_path, "bert-classifier")) as encoder:
        assert encoder.encode(questions()[0]).logits.shape == (3,)
        with pytest.raises(ValueError, match=r"inputs\[1\]: a pair needs the special tokens"):
            encoder.encode(["t10", *questions()], add_special_tokens=False)
        with pytest.raises(ValueError, match=r"inputs\[1\] has 65 tokens, the limit is 64 \(max_seq_len\)"):
            encoder.encode(["t10", {"prompt": "t10 " * 31, "text_pair": "t11 " * 31}])
        with pytest.raises(ValueError, match=r"the input has half of a surrogate pair"):
            encoder.encode({"prompt": "t10", "text_pair": "\udc00"})
        with pytest.raises(ValueError, match="text_pair is a list, not a text"):
            encoder.encode({"prompt": "t10", "text_pair": ["t11"]})  # type: ignore[typeddict-item]
