"""What a worker tells of pairs and probabilities: segments, the pieces of a chat template, what makes labels' probabilities."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from packhorse_shared.messages import MAX_FACTS_BYTES, ModelFacts, PairSlot, PairText
from packhorse_worker.engine.pair_text import PairTextError, find_pair_text
from reference import ids_of, runner_of, vectors_of
from tiny_heads import CHAT_TEMPLATE, build_causal_reranker, build_cross_encoder, build_head, build_pooled_reranker
from tiny_models import build_t, write_json

QUERY, DOCUMENT, PROMPT = PairSlot.QUERY, PairSlot.DOCUMENT, PairSlot.PROMPT


def facts_of(folder: Path, **settings: Any) -> ModelFacts:
    facts = runner_of(folder, **settings).facts
    encoded = msgspec.msgpack.encode(facts)
    assert len(encoded) <= MAX_FACTS_BYTES
    assert msgspec.msgpack.decode(encoded, type=ModelFacts) == facts
    return facts


def change(path: Path, **changes: Any) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


def with_template(folder: Path, template: str) -> Path:
    build_causal_reranker(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_the_pieces_of_a_chat_template(tmp_path: Path) -> None:
    facts = facts_of(build_causal_reranker(tmp_path / "model"))
    assert facts.pair_text == PairText(
        plain=("t41 ", QUERY, " t42 ", DOCUMENT, " t43 t44"),
        prompted=("t40 ", PROMPT, " t41 ", QUERY, " t42 ", DOCUMENT, " t43 t44"),
    )
    assert (facts.pair_problem, facts.segments, facts.probabilities) == ("", 1, "none")


def test_a_template_that_strips(tmp_path: Path) -> None:
    facts = facts_of(with_template(tmp_path / "model", CHAT_TEMPLATE.replace("message.content +", "message.content | trim +")))
    assert facts.pair_text is not None
    assert facts.pair_text.strips


CONTENT = "{% for message in messages %}{{ message.role + ' ' + (CONTENT) + '\\n' }}{% endfor %}"
ODD_TEMPLATES: dict[str, tuple[str, str]] = {
    "quotes": (CONTENT.replace("CONTENT", "message.content | tojson"), "it changes texts"),
    "upper case": (CONTENT.replace("CONTENT", "message.content | upper"), "it does not show a query as it is"),
    "strips one": (CONTENT.replace("CONTENT", "message.content | trim if loop.index0 else message.content"), "changes"),
    "cuts": (CONTENT.replace("CONTENT", "message.content[:500]"), "changes"),
    "escapes": (CONTENT.replace("CONTENT", "message.content | e"), "changes"),
    "skips the empty": (CONTENT.replace("CONTENT", "message.content or 'nothing'"), "the query ''"),
    "refuses": (CONTENT.replace("CONTENT", "message.content if message.content != '0' else raise_exception('')"), "Template"),
    "the day": (CONTENT.replace("CONTENT", "strftime_now('%Y') + message.content"), "tells the time"),
    "long": (CONTENT.replace("CONTENT", f"'{'t10 ' * 3000}' + message.content"), "of its own, limit 16384"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_TEMPLATES)
def test_a_template_that_pieces_cannot_tell_costs_only_pairs(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    template, reason = ODD_TEMPLATES[name]
    folder = with_template(tmp_path / "model", template)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        runner = runner_of(folder)
    facts = runner.facts
    assert facts.pair_text is None
    assert reason in facts.pair_problem
    assert "\n" not in facts.pair_problem
    assert ["cannot be given pairs" in record.getMessage() for record in caplog.records] == [True]
    assert vectors_of(runner, ids_of(folder, ["t10 t11"])).shape == (1, 1)


def test_texts_that_look_like_marks_are_texts() -> None:
    """And where a text stands is not told by what it says."""

    def render(query: str, document: str, prompt: str) -> str:
        return f"{prompt}|{document}|{query}|{document}"

    form = find_pair_text(render)
    assert form.plain == ("|", DOCUMENT, "|", QUERY, "|", DOCUMENT)
    assert form.prompted == (PROMPT, "|", DOCUMENT, "|", QUERY, "|", DOCUMENT)
    with pytest.raises(PairTextError, match="changes texts"):
        find_pair_text(
            lambda query, document, prompt: render(query, document, prompt) + ("!" if "xqz" in prompt + query[1:2] else "")
        )


def test_a_prompt_that_a_template_ignores_is_ignored() -> None:
    form = find_pair_text(lambda query, document, _prompt: f"{query}\n{document}")
    assert form.plain == form.prompted == (QUERY, "\n", DOCUMENT)


def test_a_template_never_meant_for_pairs_names_no_folder(tmp_path: Path) -> None:
    folder = build_causal_reranker(tmp_path / "model", "bare")
    (folder / "chat_template.jinja").write_text("{{ 't40 ' + messages | length | string }}")
    facts = facts_of(folder)
    assert facts.pair_problem.startswith("chat_template.jinja: the chat template cannot carry a pair")
    assert str(tmp_path) not in facts.pair_problem


def test_pieces_that_do_not_fit_beside_the_prompts(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "model", CONTENT.replace("CONTENT", f"'{'t10 ' * 600}' + message.content"))
    assert facts_of(folder).pair_text is not None
    change(
        folder / "config_sentence_transformers.json",
        prompts={f"p{number}": "t10 " * 2000 for number in range(5)},
        default_prompt_name=None,
    )
    facts = facts_of(folder)
    assert facts.pair_text is None
    assert "too long to be told" in facts.pair_problem


def test_a_tokenizer_that_transformers_cannot_read(tmp_path: Path) -> None:
    folder = build_cross_encoder(tmp_path / "model", "up to 5.3")
    change(folder / "tokenizer_config.json", added_tokens_decoder={"no id": {}})
    assert "transformers cannot read the tokenizer" in facts_of(folder).pair_problem


def test_types_that_the_model_does_not_have(tmp_path: Path) -> None:
    """transformers would make them too, and the model would fail on them."""
    folder = build_cross_encoder(tmp_path / "model", "up to 5.3", type_vocab_size=2)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["pair"] = json.loads(
        json.dumps(content["post_processor"]["pair"]).replace('"type_id": 1', '"type_id": 3')
    )
    path.write_text(json.dumps(content))
    facts = facts_of(folder)
    assert facts.pair_problem == "tokenizer.json marks a text of a pair with type 3, but the model has 2 types"


SEGMENTS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "BERT": (lambda folder: build_cross_encoder(folder, "new"), 2),
    "more types": (lambda folder: build_cross_encoder(folder, "new", type_vocab_size=4), 4),
    "too many to tell": (lambda folder: build_cross_encoder(folder, "new", type_vocab_size=500), 128),
    "one type": (lambda folder: build_cross_encoder(folder, "new", type_vocab_size=1), 1),
    "classifier": (lambda folder: build_head(folder, "bert-classifier"), 2),
    "no types in the forward": (lambda folder: build_head(folder, "distilbert-classifier"), 1),
    "no types in the table": (lambda folder: build_head(folder, "deberta-v2-classifier"), 1),
    "no types of the tokenizer": (lambda folder: build_head(folder, "roberta-classifier", type_vocab_size=2), 1),
    "embeddings": (build_t, 1),
    "pooled": (build_pooled_reranker, 1),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(tmp_path: Path, name: str) -> None:
    build, segments = SEGMENTS[name]
    assert facts_of(build(tmp_path / "model")).segments == segments


def test_a_table_of_types_that_only_the_class_knows(tmp_path: Path) -> None:
    """config.json may leave out what its class has by default."""
    folder = build_cross_encoder(tmp_path / "model", "new")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    assert content.pop("type_vocab_size") == 2
    write_json(path, content)
    assert facts_of(folder).segments == 2


def test_a_table_too_large_for_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse_worker.engine.pair_facts._MOST_ROWS", 100)
    facts = facts_of(build_cross_encoder(tmp_path / "model", "new"))
    assert facts.segments == 1
    assert "has 128 embeddings" in facts.pair_problem
    assert facts_of(build_head(tmp_path / "classifier", "bert-classifier")).segments == 1
    assert facts_of(build_causal_reranker(tmp_path / "yes")).pair_problem == ""


def test_the_fingerprint_covers_what_changes_scores(tmp_path: Path) -> None:
    folder = build_causal_reranker(tmp_path / "model")
    plain = facts_of(folder).fingerprint
    assert facts_of(folder).fingerprint == plain
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("t41", "t45"))
    assert facts_of(folder).fingerprint != plain
    bert = build_cross_encoder(tmp_path / "bert", "new")
    before = facts_of(bert).fingerprint
    tokenizer = json.loads((bert / "tokenizer_config.json").read_text())
    change(bert / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    assert "token_type_ids" in tokenizer["model_input_names"]
    assert facts_of(bert).fingerprint != before


PROBLEMS: list[tuple[str, int, dict[str, Any], str]] = [
    ("several labels", 3, {}, "softmax"),
    ("one label", 1, {}, "sigmoid"),
    ("regression", 1, {"problem_type": "regression"}, "none"),
    ("regression of several", 3, {"problem_type": "regression"}, "none"),
    ("multi label", 3, {"problem_type": "multi_label_classification"}, "sigmoid"),
    ("single label", 3, {"problem_type": "single_label_classification"}, "softmax"),
    ("a function of its own", 3, {"function_to_apply": "none"}, "softmax"),
]
APPLY: dict[str, Callable[[Any], Any]] = {
    "none": lambda logits: logits,
    "sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
    "softmax": lambda logits: np.exp(logits) / np.exp(logits).sum(-1, keepdims=True),
}


@pytest.mark.parametrize(("labels", "config", "expected"), [each[1:] for each in PROBLEMS], ids=[each[0] for each in PROBLEMS])
def test_probabilities_are_what_transformers_pipeline_gives(
    tmp_path: Path, labels: int, config: dict[str, Any], expected: str
) -> None:
    from transformers import pipeline

    folder = build_head(
        tmp_path / "model", "bert-classifier", id2label={number: f"label {number}" for number in range(labels)}, **config
    )
    runner = runner_of(folder)
    assert runner.facts.probabilities == expected
    classifier = pipeline("text-classification", str(folder), device="cpu")
    for text in ("t10", "t20 t21 t22"):
        logits = vectors_of(runner, ids_of(folder, [text]))[0].astype(np.float64)
        found = dict(zip(runner.facts.labels, APPLY[expected](logits), strict=True))
        assert {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in classifier(text, top_k=None)} == found


def test_what_is_no_classifier_has_no_probabilities(tmp_path: Path) -> None:
    assert facts_of(build_t(tmp_path / "t")).probabilities == "none"
    assert facts_of(build_head(tmp_path / "tokens", "bert-token-reward")).probabilities == "none"
    assert facts_of(build_head(tmp_path / "reward", "qwen3-reward")).probabilities == "sigmoid"
