"""Models with code of their own, which may do anything: packed where that is right, else padded or refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils

import odd_model
from packhorse import Encoder, ModelFilesError
from packhorse_worker.engine import linear
from packhorse_worker.engine.joined import JoinedPart
from packhorse_worker.engine.linear import OneDnnLinear
from tiny_models import save_tokenizer, write_json, write_parts

INPUTS = [list(range(20, 20 + length)) for length in (20, 9, 5, 13, 13, 1)]
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Makes a folder with code; where transformers copies that to is removed with the test."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(linear, "_is_faster", lambda *_: True)

    def make(oddity: str = "none", name: str = "OddModel") -> Path:
        folder = tmp_path / name
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            getattr(odd_model, name)(odd_model.OddConfig(oddity)).save_pretrained(folder)
        shutil.copy(odd_model.__file__, folder / "modeling_odd.py")
        autos = {"AutoConfig": "OddConfig", "AutoModel": "OddModel", f"AutoModel{name.removeprefix('Odd')}": name}
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", {**config, "auto_map": {key: f"modeling_odd.{each}" for key, each in autos.items()}})
        names = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
        save_tokenizer(folder, names, "[CLS] $A [SEP]", ("[CLS]", "[SEP]"), unk="[UNK]", pad="[PAD]", longest=64)
        if name == "OddModel":
            write_parts(folder, pooling=("mean",), normalize=False)
        return folder

    return make


def _alone(folder: Path, name: str) -> list[Any]:
    model = getattr(odd_model, name).from_pretrained(folder).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids]), torch.ones(1, len(ids))) for ids in INPUTS]


@pytest.mark.parametrize(
    ("oddity", "is_packed", "joins", "packs"),
    [
        ("none", True, True, True),
        ("own_attention", False, True, True),
        ("reads_weights", True, False, False),
        ("changes_input", True, False, True),
        ("other_inputs", True, True, True),
        ("merges_rows", True, False, True),
    ],
)
def test_vectors_are_those_of_one_input_at_a_time(build: Build, oddity: str, is_packed: bool, joins: bool, packs: bool) -> None:
    folder = build(oddity)
    with Encoder(folder, trust_remote_code=True) as encoder:
        outputs = encoder.encode(INPUTS, batch_indexed_model_output=False)
        assert encoder._runner is not None
        assert encoder._runner.pipeline.is_packed == is_packed
        modules = list(encoder._runner.pipeline.transform._transformer.modules())  # type: ignore[attr-defined]
    assert any(isinstance(each, JoinedPart) for each in modules) == joins
    assert any(isinstance(each, OneDnnLinear) for each in modules) == packs
    for each, own in zip(outputs, _alone(folder, "OddModel"), strict=True):
        torch.testing.assert_close(each.logits, own.last_hidden_state[0], atol=1e-5, rtol=0)


def test_dropout_that_is_left_on_is_refused(build: Build) -> None:
    with pytest.raises(ModelFilesError, match="gives another output for the same 4 tokens each time"):
        Encoder(build("dropout"), trust_remote_code=True)


def test_weights_that_are_drawn_again_after_loading_are_refused(build: Build) -> None:
    with pytest.raises(ModelFilesError, match=r"holds other values of .*\.weight than .*model\.safetensors.*random"):
        Encoder(build("draws_again"), trust_remote_code=True)


def test_a_classifier_that_makes_its_mask_itself(build: Build) -> None:
    folder = build(name="OddForSequenceClassification")
    with Encoder(folder, trust_remote_code=True) as encoder:
        outputs = encoder.encode(INPUTS)
    for each, own in zip(outputs, _alone(folder, "OddForSequenceClassification"), strict=True):
        torch.testing.assert_close(each.logits, own.logits[0], atol=1e-5, rtol=0)


def test_a_token_classifier_that_reads_neighbours_is_refused(build: Build) -> None:
    """Packed, a token's neighbours may belong to another input."""
    with pytest.raises(ModelFilesError, match="the token classifier of a odd reads more than the token itself"):
        Encoder(build(name="OddForTokenClassification"), trust_remote_code=True)
