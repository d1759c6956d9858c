"""Pairs as the server makes them: the frontend's words, the worker's scores, beside sentence-transformers' CrossEncoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from packhorse import Encoder
from packhorse_frontend.bodies.inputs import LengthRule
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.tokens.pairs import PairTokenizer, PairWork
from packhorse_shared.messages import SEGMENT_SHIFT, EncodeOptions, ModelFacts
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer
from tiny_heads import CHAT_TEMPLATE, build_causal_reranker, build_cross_encoder, build_head, build_pooled_reranker, save_again
from tiny_models import write_json

TEXTS = [
    ("t10", "t11"),
    ("t20 t21 t22", "t30"),
    ("", "t40 t41"),
    ("t50", ""),
    ("t60 unknown t61", "t62 [SEP] </s> t63"),
    ("  t10\n", "\tt11  t12 "),
    ("t10 t11", " ".join(f"t{number}" for number in range(70, 100))),
]
STRIPPING = CHAT_TEMPLATE.replace("message.content +", "(message.content | trim) +")


def _classifier_behind_a_template(folder: Path) -> Path:
    build_head(folder, "qwen3-reward")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    path = folder / "config.json"
    section = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    write_json(path, {**json.loads(path.read_text()), "sentence_transformers": section})
    save_again(folder)
    return folder


def _stripping(folder: Path) -> Path:
    build_causal_reranker(folder)
    (folder / "chat_template.jinja").write_text(STRIPPING)
    return folder


def _with_a_prompt(folder: Path) -> Path:
    build_cross_encoder(folder, "new")
    path = folder / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "t20 t21 "}, "default_prompt_name": "query"}
    write_json(path, {**json.loads(path.read_text()), **prompts})
    return folder


def _one_label(name: str) -> Callable[[Path], Path]:
    return lambda folder: build_head(folder, name, num_labels=1)


RERANKERS: dict[str, Callable[[Path], Path]] = {
    "cross-encoder before 4.0": lambda folder: build_cross_encoder(folder, "before 4.0"),
    "cross-encoder up to 5.3": lambda folder: build_cross_encoder(folder, "up to 5.3"),
    "cross-encoder new": lambda folder: build_cross_encoder(folder, "new"),
    "bert": lambda folder: build_head(folder, "bert-classifier", id2label={0: "relevant"}),
    "with a prompt": _with_a_prompt,
    "pooled": build_pooled_reranker,
    "yes or no": build_causal_reranker,
    "yes or no, bare": lambda folder: build_causal_reranker(folder, "bare"),
    "yes alone": lambda folder: build_causal_reranker(folder, single=True),
    "yes or no, stripping": _stripping,
    "classifier behind a chat template": _classifier_behind_a_template,
    **{
        family: _one_label(f"{family}{'' if family == 'xlm-r-reranker' else '-classifier'}")
        for family in ("roberta", "xlm-r-reranker", "distilbert", "albert", "electra", "mpnet", "deberta-v2")
    },
    "modernbert, cls": _one_label("modernbert-classifier-cls"),
    "modernbert, mean": _one_label("modernbert-classifier-mean"),
}  # fmt: skip
WITH_SEGMENTS = {
    "cross-encoder before 4.0",
    "cross-encoder up to 5.3",
    "cross-encoder new",
    "with a prompt",
    "bert",
    "albert",
    "electra",
}
"""DeBERTa reads token types, but has a table without rows."""


def words_of(folder: Path, facts: ModelFacts, texts: Sequence[tuple[str, str]], prompt: str) -> list[NDArray[np.int32]]:
    naming = Naming.of("text_2", len(texts), listed=True)
    queries = Naming.of("text_1", len(texts), listed=True)
    rule = LengthRule(facts.max_seq_len, "max_seq_len", None)
    work = PairWork(texts, 0, naming, queries, prompt, facts.lowercase, rule, cuts=False, most_document_tokens=None)
    tokens = PairTokenizer(ModelTokenizer(read_tokenizer(folder)), facts).tokenize(work, lambda: False)
    return np.split(tokens.ids, np.cumsum(tokens.lengths)[:-1])


@pytest.mark.parametrize("name", RERANKERS)
def test_ids_and_scores_are_those_of_a_cross_encoder(tmp_path: Path, name: str) -> None:
    from sentence_transformers import CrossEncoder

    folder = RERANKERS[name](tmp_path / "model")
    reference = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    with Encoder(folder) as encoder:
        facts = encoder.facts
        assert (facts.task, facts.pair_problem) == ("rerank", "")
        assert facts.segments == (2 if name in WITH_SEGMENTS else 1)
        default = facts.prompts.get(facts.default_prompt_name or "", "")
        for asked, prompt in ((None, default), ("t25 t26 ", "t25 t26 ")):
            words = words_of(folder, facts, TEXTS, prompt)
            for each, pair in zip(words, TEXTS, strict=True):
                expected = reference.preprocess([list(pair)], prompt=reference._resolve_prompt(asked, None))
                assert (each % (1 << SEGMENT_SHIFT)).tolist() == expected["input_ids"][0].tolist(), pair
                if facts.segments > 1:
                    assert (each >> SEGMENT_SHIFT).tolist() == expected["token_type_ids"][0].tolist(), pair
            scores = [reference.predict([list(pair)], prompt=asked, show_progress_bar=False)[0] for pair in TEXTS]
            batch = encoder.start_batch(words, [EncodeOptions(scored=True)] * len(words))()
            assert (batch.failures, batch.row_values) == ([], [1] * len(words))
            assert batch.values.dtype == np.dtype("<f4")
            np.testing.assert_allclose(batch.values, np.array(scores), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "yes or no", "pooled"])
def test_scores_and_logits_in_one_batch(tmp_path: Path, name: str) -> None:
    """And a failed input among them has no row at all."""
    with Encoder(RERANKERS[name](tmp_path / "model")) as encoder:
        words = words_of(tmp_path / "model", encoder.facts, TEXTS[:4], "")
        logits = encoder.start_batch(words, [EncodeOptions()] * 4)().values
        scores = encoder.start_batch(words, [EncodeOptions(scored=True)] * 4)().values
        words.insert(1, np.array([5, 999], dtype=np.int32))
        mixed = encoder.start_batch(words, [EncodeOptions(scored=number % 2 == 0) for number in range(5)])()
    assert [each.index for each in mixed.failures] == [1]
    assert mixed.row_values == [1, 0, 1, 1, 1]
    assert not np.allclose(logits, scores)
    np.testing.assert_allclose(mixed.values, [scores[0], scores[1], logits[2], scores[3]], rtol=0, atol=1e-6)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=0, atol=1e-6)


def test_a_real_tokenizer(tmp_path: Path, minilm_folder: Path) -> None:
    from sentence_transformers import CrossEncoder

    from models.test_pairs import build_with_real_tokenizer

    folder = build_with_real_tokenizer(tmp_path / "model", minilm_folder)
    pairs = [
        ("How many people live in Berlin?", "Berlin had 3,520,031 registered inhabitants."),
        ("Caf\u00e9 \ufb01 \u65e5\u672c\u8a9e", "  two  spaces,\ta tab\n and [SEP] \U0001f40e"),
        ("short", "word " * 200),
    ]
    reference = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    expected = [reference.predict([list(pair)], show_progress_bar=False)[0] for pair in pairs]
    with Encoder(folder) as encoder:
        words = words_of(folder, encoder.facts, pairs, "")
        found = encoder.start_batch(words, [EncodeOptions(scored=True)] * 3)().values
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_pair_cut_by_the_frontend_scores_as_the_cross_encoder_cuts_it(tmp_path: Path) -> None:
    """Where only the document is longer than its half, both cut the same tokens."""
    from sentence_transformers import CrossEncoder

    folder = build_cross_encoder(tmp_path / "model", "new")
    pair = ("t10 t11", " ".join(f"t{10 + number % 100}" for number in range(300)))
    expected = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict([pair], show_progress_bar=False)
    with Encoder(folder) as encoder:
        naming = Naming.of("documents", 1, listed=True)
        rule = LengthRule(encoder.facts.max_seq_len, "max_seq_len", None)
        work = PairWork([pair], 0, naming, naming, "", False, rule, cuts=True, most_document_tokens=None)
        tokens = PairTokenizer(ModelTokenizer(read_tokenizer(folder)), encoder.facts).tokenize(work, lambda: False)
        assert (tokens.lengths, tokens.cut) == ([64], (0,))
        found = encoder.start_batch([tokens.ids], [EncodeOptions(scored=True)])().values
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
