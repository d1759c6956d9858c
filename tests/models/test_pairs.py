"""Pairs become exactly the ids and token types that sentence-transformers' CrossEncoder feeds its model."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.model_folder import read_model_folder
from packhorse_worker.engine.pairs import PairTokenizer, open_pairs
from packhorse_worker.engine.tokenizer import check_tokenizer
from tiny_heads import CHAT_TEMPLATE, build_causal_reranker, build_cross_encoder, build_head, build_pooled_reranker, save_again
from tiny_models import ROWS, SIZES, save_transformer, write_json

PAIRS = [("t10", "t11"), ("t20 t21 t22", "t30"), ("", "t40 t41"), ("t50", ""), ("t60 unknown t61", "t62 [SEP] </s> t63")]
STRUCTURED = CHAT_TEMPLATE.replace("message.content +", "message.content[0].text +")


def pairs_of(folder: Path, *, token_types: int = 2) -> PairTokenizer:
    settings = ModelSettings()
    return open_pairs(read_model_folder(folder, settings), settings, token_types=token_types)


def compare(folder: Path, pairs: Sequence[tuple[str, str]] = PAIRS, *, prompt: str | None = None) -> set[bool]:
    """Compare pair by pair, and tell whether there were token types."""
    from sentence_transformers import CrossEncoder

    reference = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    resolved = reference._resolve_prompt(prompt, None)
    found = pairs_of(folder).encode(pairs, prompt)
    for pair, (ids, types) in zip(pairs, found, strict=True):
        expected = reference.preprocess([list(pair)], prompt=resolved)
        assert str(ids.dtype) == "int32"
        assert ids.tolist() == expected["input_ids"][0].tolist(), pair
        assert (types is not None) == ("token_type_ids" in expected)
        if types is not None:
            assert str(types.dtype) == "int64"
            assert types.tolist() == expected["token_type_ids"][0].tolist()
    return {types is not None for _, types in found}


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    write_json(path, {key: value for key, value in {**content, **changes}.items() if value is not ...})


@pytest.mark.parametrize(
    ("name", "has_types"),
    [
        ("bert-classifier", True),
        ("deberta-v2-classifier", True),
        ("modernbert-classifier-cls", True),
        ("roberta-classifier", False),
        ("xlm-r-reranker", False),
        ("mpnet-classifier", False),
        ("qwen3-reward", False),
    ],
)
def test_the_tokenizers_own_pair_template(tmp_path: Path, name: str, *, has_types: bool) -> None:
    assert compare(build_head(tmp_path / "model", name)) == {has_types}


@pytest.mark.parametrize("form", ["before 4.0", "up to 5.3", "new"])
def test_cross_encoders_of_every_format(tmp_path: Path, form: str) -> None:
    folder = build_cross_encoder(tmp_path / "model", form)
    assert compare(folder) == {True}
    [(ids, types)] = pairs_of(folder).encode([("t10 t11", "t12")])
    assert ids.tolist() == [2, 10, 11, 3, 12, 3]
    assert types is not None
    assert types.tolist() == [0, 0, 0, 0, 1, 1]


def test_token_types_only_where_the_model_is_told_them(tmp_path: Path) -> None:
    [(_, types)] = pairs_of(build_cross_encoder(tmp_path / "model", "new"), token_types=1).encode(PAIRS[:1])
    assert types is None


def test_a_pooled_cross_encoder(tmp_path: Path) -> None:
    compare(build_pooled_reranker(tmp_path / "model"))


def build_with_real_tokenizer(folder: Path, minilm_folder: Path) -> Path:
    """A cross-encoder with the tokenizer of all-MiniLM-L6-v2, which is ms-marco-MiniLM's too: its file cuts and pads at 128."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**{**SIZES, "vocab_size": 30522, "num_labels": 1})
    save_transformer(folder, BertForSequenceClassification, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (minilm_folder / name).is_file():
            shutil.copy(minilm_folder / name, folder)
    return folder


def test_a_real_tokenizer(tmp_path: Path, minilm_folder: Path) -> None:
    pairs = [
        ("How many people live in Berlin?", "Berlin had 3,520,031 registered inhabitants."),
        ("Caf\u00e9 \ufb01 \u65e5\u672c\u8a9e", "  two  spaces,\ta tab\n and [SEP] \U0001f40e"),
        ("short", "word " * 200),
    ]
    assert compare(build_with_real_tokenizer(tmp_path / "model", minilm_folder), pairs) == {True}


@pytest.mark.parametrize("form", ["new", "bare"])
@pytest.mark.parametrize("prompt", [None, "", "t25"])
def test_the_chat_template_of_a_causal_reranker(tmp_path: Path, form: str, prompt: str | None) -> None:
    assert compare(build_causal_reranker(tmp_path / "model", form), prompt=prompt) == {False}


def test_the_default_prompt_and_the_generation_prompt_are_in_the_text(tmp_path: Path) -> None:
    pairs = pairs_of(build_causal_reranker(tmp_path / "model"))
    [(ids, _)] = pairs.encode([("t10", "t11")])
    assert ids.tolist() == [40, 20, 21, 41, 10, 42, 11, 43, 44], "no end token: the model goes on from here"
    [(ids, _)] = pairs.encode([("t10", "t11")], "")
    assert ids.tolist() == [41, 10, 42, 11, 43, 44]


@pytest.mark.parametrize("declared", ["structured", "auto"])
def test_a_template_of_typed_parts(tmp_path: Path, declared: str) -> None:
    folder = build_causal_reranker(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(STRUCTURED)
    path = folder / "sentence_bert_config.json"
    modalities = json.loads(path.read_text())["modality_config"]
    change(path, modality_config={**modalities, "message": {**modalities["message"], "format": declared}})
    compare(folder)


def test_a_classifier_behind_a_chat_template(tmp_path: Path) -> None:
    """As the sequence-classification copies of Qwen3-Reranker are saved since 5.4."""
    folder = build_head(tmp_path / "model", "qwen3-reward")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    change(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"})
    assert compare(folder) == {False}
    save_again(folder)
    assert "message" in json.loads((folder / "sentence_bert_config.json").read_text())["modality_config"]
    compare(folder)
    [(ids, _)] = pairs_of(folder).encode([("t10", "t11")])
    assert ids.tolist() == [41, 10, 42, 11, 43]


def test_a_prompt_goes_before_the_query(tmp_path: Path) -> None:
    folder = build_cross_encoder(tmp_path / "model", "new")
    change(folder / "config_sentence_transformers.json", prompts={"query": "t20 t21 "}, default_prompt_name="query")
    compare(folder)
    [(ids, _)] = pairs_of(folder).encode([("t10", "t11")])
    assert ids.tolist() == [2, 20, 21, 10, 3, 11, 3]


def test_lower_case_is_what_sentence_transformers_lowers(tmp_path: Path) -> None:
    folder = build_cross_encoder(tmp_path / "model", "new")
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    compare(folder, [("T10 T11", "t12 T13")])
    [(ids, _)] = pairs_of(folder).encode([("T10", "T11")])
    assert ids.tolist() == [2, 10, 3, 11, 3]


LOSSES: list[tuple[str, str, str]] = [
    ("no roles", "{{ 't40 ' + messages | length | string }}", "a message of the role query is lost"),
    (
        "users only",
        "{% for message in messages if message.role == 'query' %}{{ message.content }}{% endfor %}",
        "a message of the role document is lost",
    ),
    ("raises", "{{ raise_exception('only users here') }}", "it raises TemplateError: only users here"),
]


@pytest.mark.parametrize(("template", "expected"), [each[1:] for each in LOSSES], ids=[each[0] for each in LOSSES])
def test_a_template_that_loses_a_text_is_refused_in_one_line(tmp_path: Path, template: str, expected: str) -> None:
    folder = build_causal_reranker(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(
        ModelFilesError, match=rf"chat_template\.jinja: the chat template cannot carry a pair: {expected}"
    ) as caught:
        pairs_of(folder)
    assert "\n" not in str(caught.value)


def check(folder: Path) -> None:
    settings = ModelSettings()
    check_tokenizer(read_model_folder(folder, settings), settings, ROWS)


@pytest.mark.parametrize("build", [build_causal_reranker, lambda path: build_cross_encoder(path, "new")])
def test_the_check_at_the_start_is_content_with_good_folders(
    tmp_path: Path, build: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(tmp_path / "model")
    caplog.clear()
    check(folder)
    assert caplog.records == []


def test_the_start_is_refused_where_a_declared_template_cannot_carry_pairs(tmp_path: Path) -> None:
    folder = build_causal_reranker(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json: the chat template cannot carry a pair"):
        check(folder)


def test_a_template_that_was_never_meant_for_pairs_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer of Qwen3-Reranker has the template of the chat model that it was made from."""
    folder = build_causal_reranker(tmp_path / "model", "bare")
    (folder / "chat_template.jinja").write_text(LOSSES[0][1])
    with caplog.at_level(logging.WARNING):
        check(folder)
    assert ["cannot be given pairs" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("place", "what"), [(0, "the pair"), (1, "the token types of the pair")])
def test_another_reading_of_a_pair_stops_the_start(tmp_path: Path, minilm_folder: Path, place: int, what: str) -> None:
    """transformers builds a BERT tokenizer anew, with a pair template of its own."""
    folder = build_with_real_tokenizer(tmp_path / "model", minilm_folder)
    check(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    pair = content["post_processor"]["pair"]
    pair[-2] = {"Sequence": {"id": "B", "type_id": 0}} if place else {"Sequence": {"id": "A", "type_id": 1}}
    path.write_text(json.dumps(content))
    with pytest.raises(ModelFilesError, match=rf"tokenizer\.json makes \[.*\] of {what} .*make them agree"):
        check(folder)
