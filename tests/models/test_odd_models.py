"""Models that packing or padding would make wrong only for some inputs: beyond the first lengths tried, or of special ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.lanes.lane import How
from reference import runner_of
from tiny_families import build_family
from tiny_models import SIZES, build_x, save_tokenizer, save_transformer, write_parts

_NAMES = {"<cls>": 0, "<pad>": 1, "<eos>": 2, "<unk>": 3}
_CHUNKED = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def _build(folder: Path, config: Any) -> Path:
    save_transformer(folder, transformers.AutoModel.from_config, config)
    save_tokenizer(folder, _NAMES, "<cls> $A <eos>", ("<cls>", "<eos>"), unk="<unk>", pad="<pad>", longest=100)
    write_parts(folder, pooling=("mean",), normalize=False)
    return folder


def _largest_difference(folder: Path, inputs: list[list[int]]) -> float:
    """Of all token vectors of a batch, from those of transformers one input at a time."""
    runner = runner_of(folder)
    outcome = runner.run([Input(np.array(ids, dtype=np.int32)) for ids in inputs], How(per_token=True))
    assert outcome.failures == []
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        alone = [model(torch.tensor([ids]), torch.ones(1, len(ids))).last_hidden_state[0] for ids in inputs]
    pairs = zip(outcome.rows, alone, strict=True)
    return max(float((row - own).abs().max()) for row, own in pairs if row is not None)


def _ids(length: int, *, start: int = 60) -> list[int]:
    return [start + place % 60 for place in range(length)]


def test_a_pad_id_inside_an_input_counts_no_position_in_the_roberta_family(tmp_path: Path) -> None:
    """As the text "a <pad> b" has one."""
    inputs = [[0, 60, 1, 61, 62, 2], _ids(6), [1, 1, 63, 2], [1], [0, 64, 65, 1], _ids(20)]
    assert _largest_difference(build_x(tmp_path), inputs) <= 1e-5


@pytest.mark.parametrize("chunk", [16, 40])
def test_attention_in_chunks_that_are_longer_than_most_inputs(tmp_path: Path, chunk: int) -> None:
    config = transformers.Llama4TextConfig(attention_chunk_size=chunk, max_position_embeddings=100, **_CHUNKED, **SIZES)
    assert _largest_difference(_build(tmp_path, config), [_ids(50), _ids(50, start=50), _ids(17), _ids(3)]) <= 1e-5


def test_chunks_too_long_to_be_tried_are_not_packed(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(attention_chunk_size=2048, max_position_embeddings=4096, **_CHUNKED, **SIZES)
    assert not runner_of(_build(tmp_path, config), max_seq_len=4096).pipeline.is_packed


def test_a_window_too_long_to_be_tried_is_packed_where_the_model_says_it(tmp_path: Path) -> None:
    folder = build_family(tmp_path, "mistral", sliding_window=2048, max_position_embeddings=4096)
    assert runner_of(folder, max_seq_len=4096).pipeline.is_packed


def test_a_model_that_counts_mask_tokens_of_its_whole_row(tmp_path: Path) -> None:
    """ESM scales its embeddings by their share."""
    positions = {"position_embedding_type": "rotary", "max_position_embeddings": 100}
    config = transformers.EsmConfig(mask_token_id=50, pad_token_id=1, token_dropout=True, **positions, **SIZES)
    folder = _build(tmp_path, config)
    assert _largest_difference(folder, [[0, 50, 50, 60, 2], [0, 60, 61, 62, 2], _ids(12)]) <= 1e-5
    assert not runner_of(folder, dtype="bfloat16").pipeline.is_packed


def test_an_input_of_nothing_but_pad_ids_is_classified_by_its_first_token(tmp_path: Path) -> None:
    """As transformers' decoders do it; told apart where positions are learned."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=128, pad_token_id=1, num_labels=3
    )
    save_transformer(tmp_path, transformers.GPT2ForSequenceClassification, config)
    save_tokenizer(tmp_path, _NAMES, "<cls> $A <eos>", ("<cls>", "<eos>"), unk="<unk>", pad="<pad>", longest=64)
    inputs = [[1, 1, 1], [60, 1, 1], [1, 60, 1], [60, 61, 62]]
    outcome = runner_of(tmp_path).run([Input(np.array(ids, dtype=np.int32)) for ids in inputs])
    model = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path).eval()
    for ids, row in zip(inputs, outcome.rows, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0]
        assert row is not None
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["convbert", "fnet"])
def test_a_leak_is_seen_beside_a_dimension_of_huge_values(tmp_path: Path, name: str) -> None:
    """Real models have a few such dimensions; their values say nothing about the others."""
    from safetensors.torch import load_file, save_file

    folder = build_family(tmp_path, name)
    weights = load_file(folder / "model.safetensors")
    last = [key for key in weights if key.endswith("output.LayerNorm.bias")][-1]
    weights[last][3] = 3e4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    runner = runner_of(folder)
    assert runner.pipeline.is_packed is False
    ids = [Input(np.array(_ids(length), dtype=np.int32)) for length in (5, 14, 40)]
    together, alone = runner.run(ids).rows, [runner.run([each]).rows[0] for each in ids]
    for row, own in zip(together, alone, strict=True):
        assert row is not None
        assert own is not None
        torch.testing.assert_close(row[4:], own[4:], atol=1e-5, rtol=0)
