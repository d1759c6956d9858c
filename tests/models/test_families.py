"""Every family that is served, padded in a batch of mixed lengths, against sentence-transformers one text at a time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse_shared.errors import ModelFilesError
from reference import encoder_of, ids_of, reference_vectors, texts_up_to, vectors_of
from tiny_families import FAMILIES, build_family
from tiny_models import ROWS, build_t, save_transformer

_DISTURBED_BY_PADDING = {"fnet", "convbert"}
TEXTS = texts_up_to(14, 7)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_gives_what_each_text_gives_alone(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_family(tmp_path / name, name)
    encoder = encoder_of(folder)
    ids = ids_of(folder, TEXTS)
    assert len(set(map(len, ids))) == len(ids)
    vectors = vectors_of(encoder, ids)
    assert np.abs(vectors - reference_vectors(folder, TEXTS)).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01, "the tiny model tells its inputs apart"
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["equal length" in record.getMessage() for record in warned] == [True] * (name in _DISTURBED_BY_PADDING)


@pytest.mark.parametrize(("name", "is_causal"), [("qwen3", True), ("gemma3", True), ("embeddinggemma", False)])
def test_decoders_stay_causal_and_bidirectional_ones_bidirectional(tmp_path: Path, name: str, *, is_causal: bool) -> None:
    folder = build_family(tmp_path / name, name)
    first, other = (vectors_of(encoder_of(folder, pooling="cls"), ids_of(folder, [text]))[0] for text in ("t10 t11", "t10 t12"))
    assert (np.abs(first - other).max() < 1e-6) == is_causal


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2", "qwen3", "embeddinggemma"])
def test_bfloat16_stays_near(tmp_path: Path, name: str) -> None:
    folder = build_family(tmp_path / name, name, initializer_range=0.02)
    ids = ids_of(folder, TEXTS)
    exact = vectors_of(encoder_of(folder), ids)
    near = vectors_of(encoder_of(folder, dtype="bfloat16"), ids)
    cosines = (near * exact).sum(axis=1) / np.linalg.norm(near, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosines.min() >= 0.9995
    assert near.tobytes() != exact.tobytes()


@pytest.mark.parametrize(
    ("config_name", "changes", "expected"),
    [
        ("BartConfig", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, r"model_type bart is an encoder-decoder"),
        ("CanineConfig", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}, "canine has no table of token"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, config_name: str, changes: dict[str, Any], expected: str) -> None:
    import transformers

    folder = build_t(tmp_path / "model")
    config = getattr(transformers, config_name)(vocab_size=ROWS, intermediate_size=64, **changes)
    save_transformer(folder, transformers.AutoModel.from_config, config)
    with pytest.raises(ModelFilesError, match=expected):
        encoder_of(folder)


def test_a_sharded_checkpoint_of_a_model_with_a_head(tmp_path: Path) -> None:
    """As trained for masked words: tensors named ``bert.*``, a head that is not needed, several files."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    folder = build_t(tmp_path / "t", normalize=False)
    config = BertConfig.from_pretrained(folder)
    torch.manual_seed(7)
    (folder / "model.safetensors").unlink()
    BertForMaskedLM(config).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    vectors = vectors_of(encoder_of(folder), ids_of(folder, TEXTS))
    assert np.abs(vectors - reference_vectors(folder, TEXTS)).max() <= 1e-5


def test_a_decoder_saved_for_generation_with_tied_embeddings(tmp_path: Path) -> None:
    """Tensors named ``model.*``, and no ``lm_head`` because it is the embedding table."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = build_family(tmp_path / "l", "qwen3")
    config = Qwen3Config.from_pretrained(folder)
    config.tie_word_embeddings = True
    torch.manual_seed(7)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vectors = vectors_of(encoder_of(folder), ids_of(folder, TEXTS))
    assert np.abs(vectors - reference_vectors(folder, TEXTS)).max() <= 1e-5


def test_vectors_of_another_size_than_declared_are_refused(tmp_path: Path) -> None:
    """OPT may project its last layer down, which its hidden_size does not tell."""
    import transformers

    folder = build_family(tmp_path / "l", "qwen3")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 16}
    config = transformers.OPTConfig(vocab_size=ROWS, max_position_embeddings=64, pad_token_id=0, **sizes)
    save_transformer(folder, transformers.AutoModel.from_config, config)
    with pytest.raises(ModelFilesError, match=r"gives vectors of 16 values, but its config\.json says 32"):
        encoder_of(folder)


def test_more_tokens_than_embeddings_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_t(tmp_path / "t", vocab_size=100)
    encoder_of(folder)
    told = [record for record in caplog.records if "more tokens than the model has embeddings" in record.getMessage()]
    assert [(record.__dict__["tokens"], record.__dict__["rows"]) for record in told] == [(128, 100)]
