"""Classifiers, reward models, rerankers: logits of a mixed batch against transformers, one text at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.batch import Extra, Input
from packhorse_worker.engine.runner import Runner
from reference import ids_of, runner_of, texts_up_to
from tiny_heads import HEADS, NO, YES, build_causal_reranker, build_cross_encoder, build_head

TEXTS = texts_up_to(30, 7)
"""Together more tokens than a packed forward takes without filler."""
_PADDED = {"mpnet-classifier", "deberta-v2-classifier"}
Ids = Sequence[NDArray[np.int32]]


def logits_of(runner: Runner, ids: Ids, types: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    extras = [{"token_type_ids": Extra.of_tokens(each)} for each in types] if types else [{}] * len(ids)
    outcome = runner.run([Input(each, extras=extra) for each, extra in zip(ids, extras, strict=True)])
    assert outcome.failures == []
    return [row for row in outcome.rows if row is not None]


def own_logits(folder: Path, auto_class: str, ids: Ids, **more: Any) -> list[torch.Tensor]:
    """What transformers gives, one input at a time, in float32."""
    import transformers

    model = getattr(transformers, f"AutoModelFor{auto_class}").from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor(each.astype(np.int64))[None], **more).logits[0] for each in ids]


@pytest.mark.parametrize("name", HEADS)
def test_a_batch_gives_the_logits_of_each_text_alone(tmp_path: Path, name: str) -> None:
    folder = build_head(tmp_path / name, name)
    runner = runner_of(folder)
    assert runner.pipeline.is_packed == (name not in _PADDED)
    ids = ids_of(folder, TEXTS)
    expected = own_logits(folder, HEADS[name][1], ids)
    found = logits_of(runner, ids)
    assert [row.shape for row in found] == [row.shape for row in expected]
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-5
    assert float((found[0].reshape(-1)[0] - found[-1].reshape(-1)[0]).abs()) > 1e-3, "the tiny model tells its inputs apart"
    assert all(row.shape[-1] == runner.facts.dimension for row in found)


@pytest.mark.parametrize("name", ["bert-classifier", "modernbert-classifier-mean", "qwen3-reward", "bert-token-reward"])
def test_logits_in_bfloat16_stay_near_and_come_as_float32(tmp_path: Path, name: str) -> None:
    folder = build_head(tmp_path / name, name, initializer_range=0.05)
    ids = ids_of(folder, TEXTS)
    exact = torch.cat([row.reshape(-1) for row in logits_of(runner_of(folder), ids)])
    near = torch.cat([row.reshape(-1) for row in logits_of(runner_of(folder, dtype="bfloat16"), ids)])
    assert near.dtype == torch.float32
    assert float(torch.nn.functional.cosine_similarity(near, exact, dim=0)) >= 0.9995


@pytest.mark.parametrize("form", ["before 4.0", "up to 5.3", "new"])
def test_a_cross_encoder_scores_pairs_as_sentence_transformers_does(tmp_path: Path, form: str) -> None:
    from sentence_transformers import CrossEncoder
    from tokenizers import Tokenizer

    folder = build_cross_encoder(tmp_path / "ce", form)
    runner = runner_of(folder)
    pairs = [("t10 t11 t12", text) for text in TEXTS] + [("t50", TEXTS[-1])]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoded = [tokenizer.encode(*pair) for pair in pairs]
    assert {1} <= set(encoded[0].type_ids), "the tokenizer tells the two apart"
    ids = [np.array(each.ids, dtype=np.int32) for each in encoded]
    rows = logits_of(runner, ids, [torch.tensor(each.type_ids) for each in encoded])
    scores = runner.pipeline.activation(torch.stack(rows))[:, 0].numpy()
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    expected = np.array([model.predict([pair], show_progress_bar=False)[0] for pair in pairs])
    assert np.abs(scores - expected).max() <= 1e-5
    assert np.ptp(scores) > 1e-3


def test_token_types_and_none_cannot_be_told_apart_only_where_the_model_has_none(tmp_path: Path) -> None:
    folder = build_head(tmp_path / "bert", "bert-classifier")
    runner = runner_of(folder)
    ids = ids_of(folder, ["t10 t11 t12 t13"])
    plain = logits_of(runner, ids)[0]
    zeros = logits_of(runner, ids, [torch.zeros(len(ids[0]), dtype=torch.int64)])[0]
    ones = logits_of(runner, ids, [torch.ones(len(ids[0]), dtype=torch.int64)])[0]
    assert torch.equal(plain, zeros)
    assert float((plain - ones).abs().max()) > 1e-3


@pytest.mark.parametrize(("form", "single"), [("new", False), ("new", True), ("bare", False), ("bare", True)])
def test_a_causal_reranker_gives_the_difference_of_two_logits(tmp_path: Path, form: str, *, single: bool) -> None:
    folder = build_causal_reranker(tmp_path / "yesno", form, single=single)
    runner = runner_of(folder)
    ids = ids_of(folder, TEXTS)
    found = torch.stack(logits_of(runner, ids))
    last = torch.stack([row[-1] for row in own_logits(folder, "CausalLM", ids)])
    expected = last[:, YES] if single else last[:, YES] - last[:, NO]
    assert found.shape == (len(ids), 1)
    assert float((found[:, 0] - expected).abs().max()) <= 1e-5
    if not single:
        yes = torch.softmax(last[:, [NO, YES]], dim=1)[:, 1]
        assert float((runner.pipeline.activation(found)[:, 0] - yes).abs().max()) <= 1e-5


def test_a_reward_model_skips_pad_ids_at_the_end_as_transformers_does(tmp_path: Path) -> None:
    folder = build_head(tmp_path / "reward", "qwen3-reward")
    ids = [np.array(each, dtype=np.int32) for each in ([10, 11, 0, 0], [12, 0, 13], [20, 21, 22, 23, 24])]
    expected = own_logits(folder, "SequenceClassification", ids)
    found = logits_of(runner_of(folder), ids)
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-5


def test_a_decoder_without_a_pad_id_classifies(tmp_path: Path) -> None:
    folder = build_head(tmp_path / "reward", "qwen3-reward", pad_token_id=None)
    ids = ids_of(folder, TEXTS)
    expected = own_logits(folder, "SequenceClassification", ids)
    found = logits_of(runner_of(folder), ids)
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-5


def test_a_classifier_that_reads_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertForSequenceClassification

    folder = build_head(tmp_path / "bert", "bert-classifier")
    own = BertForSequenceClassification.forward

    def reads_the_ids(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        output = own(self, input_ids=input_ids, **others)
        output.logits = output.logits + input_ids[:, -2:].sum()
        return output

    monkeypatch.setattr(BertForSequenceClassification, "forward", reads_the_ids)
    with pytest.raises(ModelFilesError, match="reads neither the first token, the last nor their mean"):
        runner_of(folder)


def test_labels_that_the_weights_do_not_have_are_named(tmp_path: Path) -> None:
    folder = build_head(tmp_path / "bert", "bert-classifier")
    _change(folder / "config.json", id2label={str(number): f"label {number}" for number in range(5)}, label2id=None)
    with pytest.raises(ModelFilesError, match=r"do not fit config\.json: .*classifier\.weight is 3x32 instead of 5x32"):
        runner_of(folder)


def test_a_label_that_is_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = build_head(tmp_path / "bert", "bert-classifier")
    _change(folder / "config.json", id2label={"0": "\ud800", "1": "b", "2": "c"}, label2id=None)
    with pytest.raises(ModelFilesError, match="surrogates not allowed"):
        runner_of(folder)


@pytest.mark.parametrize(("kept", "lost"), [((), "query"), (("A",), "document"), (("B",), "query")])
def test_a_template_for_pairs_that_loses_a_text_is_refused(tmp_path: Path, kept: tuple[str, ...], lost: str) -> None:
    folder = build_cross_encoder(tmp_path / "ce", "new")
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in kept]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    _change(folder / "tokenizer.json", post_processor={**tokenizer["post_processor"], "pair": pair})
    with pytest.raises(ModelFilesError, match=rf"tokenizer\.json: its template for pairs loses the {lost}"):
        runner_of(folder)


def _change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


Change = Callable[[Ids], Ids]


@pytest.mark.parametrize("name", ["bert-classifier", "qwen3-reward", "qwen3-token-reward"])
@pytest.mark.parametrize("arrange", [lambda ids: ids, lambda ids: ids[::-1], lambda ids: [*ids[3:], *ids[:3]]])
def test_logits_do_not_depend_on_the_place_in_the_batch(tmp_path: Path, name: str, arrange: Change) -> None:
    folder = build_head(tmp_path / name, name)
    runner = runner_of(folder)
    ids = ids_of(folder, TEXTS)
    alone = [logits_of(runner, [each])[0] for each in arrange(ids)]
    together = logits_of(runner, arrange(ids))
    assert max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True)) <= 1e-5
