"""The engine gives what sentence-transformers gives, whatever its files declare, within 1e-5 in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse_shared.messages import ErrorCode
from packhorse_worker.engine.batch import Input
from reference import ids_of, reference_vectors, runner_of, texts_up_to, vectors_of
from texts import mixed_texts
from tiny_models import HIDDEN, build_l, build_n, build_t, build_x, write_json, write_parts

MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TEXTS = texts_up_to(60, 7)


def assert_parity(folder: Path, texts: list[str]) -> None:
    vectors = vectors_of(runner_of(folder), ids_of(folder, texts))
    expected = reference_vectors(folder, texts)
    assert vectors.shape == expected.shape
    assert np.abs(vectors - expected).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01, "the tiny model tells its inputs apart"


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_pooling_modes(tmp_path: Path, mode: str, *, normalize: bool) -> None:
    assert_parity(build_t(tmp_path / "t", pooling=[mode], normalize=normalize), TEXTS)


def test_pooling_modes_are_concatenated_in_order(tmp_path: Path) -> None:
    folder = build_t(tmp_path / "t", pooling=["mean", "max", "cls"], normalize=False)
    assert runner_of(folder).facts.dimension == 3 * HIDDEN
    assert_parity(folder, TEXTS)


@pytest.mark.parametrize("build", [build_x, build_l])
def test_other_families(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    """XLM-R counts positions from its padding id; the decoder pools its last token, which is not the last column."""
    assert_parity(build(tmp_path / "model"), texts_up_to(30, 8))


@pytest.mark.parametrize("build", [build_t, build_x, build_l])
def test_old_and_new_format_of_one_pipeline_give_equal_bits(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    from sentence_transformers import SentenceTransformer

    old, new = build(tmp_path / "old"), tmp_path / "new"
    if build is build_t:
        write_parts(old, pooling=("cls", "max", "mean", "weightedmean"), normalize=True, include_prompt=False)
    SentenceTransformer(str(old), device="cpu").save(str(new))
    assert (old / "modules.json").read_text() != (new / "modules.json").read_text()
    ids = ids_of(old, texts_up_to(28, 8))
    vectors = [vectors_of(runner_of(folder), ids, prompt_tokens=2) for folder in (old, new)]
    assert vectors[0].tobytes() == vectors[1].tobytes()


def test_new_format_as_sentence_transformers_saves_it(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st

    bare = build_t(tmp_path / "bare", normalize=False)
    torch.manual_seed(7)
    parts = [
        SentenceTransformer(str(bare), device="cpu")[0],
        st.Pooling(HIDDEN, pooling_mode=("cls", "mean")),
        st.Dense(2 * HIDDEN, 24, activation_function=torch.nn.GELU()),
        st.LayerNorm(24),
        st.Dropout(0.5),
        st.Dense(24, 24, bias=False, activation_function=None, use_residual=True),
        st.Dense(24, 16, use_residual=True),
        st.Normalize(),
    ]
    prompts = {"query": "t20 t21 ", "document": ""}
    folder = tmp_path / "new"
    SentenceTransformer(modules=parts, device="cpu", prompts=prompts, default_prompt_name="query").save(str(folder))
    assert "sentence_transformers.base" in (folder / "modules.json").read_text(), "this is the format from 5.4 on"

    runner = runner_of(folder)
    facts = runner.facts
    assert (facts.dimension, facts.max_seq_len, facts.prompts, facts.default_prompt_name) == (16, 64, prompts, "query")
    vectors = vectors_of(runner, ids_of(folder, TEXTS))
    assert np.abs(vectors - reference_vectors(folder, TEXTS, prompt="")).max() <= 1e-5


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_dense_in_the_old_format(tmp_path: Path, activation: str) -> None:
    from safetensors.torch import save_file

    folder = build_t(tmp_path / "t", normalize=False)
    module = {"Tanh": "activation", "Identity": "linear"}[activation]
    write_json(
        folder / "2_Dense" / "config.json",
        {"in_features": 32, "out_features": 8, "bias": True, "activation_function": f"torch.nn.modules.{module}.{activation}"},
    )
    generator = torch.Generator().manual_seed(7)
    tensors = {"linear.weight": torch.randn(8, 32, generator=generator), "linear.bias": torch.randn(8, generator=generator)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [
        {"idx": idx, "name": str(idx), "path": f"{idx}_{kind}" if idx else "", "type": f"sentence_transformers.models.{kind}"}
        for idx, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    assert_parity(folder, TEXTS)


@pytest.mark.parametrize("mode", MODES)
def test_prompt_is_left_out_of_the_pooling(tmp_path: Path, mode: str) -> None:
    folder = build_t(tmp_path / "t", normalize=False)
    write_parts(folder, pooling=[mode], normalize=False, include_prompt=False)
    prompt = "t20 t21 "
    expected = reference_vectors(folder, TEXTS, prompt=prompt)
    ids = ids_of(folder, [prompt + text for text in TEXTS])
    runner = runner_of(folder)
    vectors = vectors_of(runner, ids, prompt_tokens=3)
    assert np.abs(vectors - expected).max() <= 1e-5
    changed = np.abs(vectors_of(runner, ids) - vectors).max() > 1e-3
    assert changed == (mode != "lasttoken")


def test_an_input_that_is_all_prompt_still_has_a_vector(tmp_path: Path) -> None:
    folder = build_t(tmp_path / "t", normalize=False)
    write_parts(folder, pooling=MODES, normalize=False, include_prompt=False)
    ids = ids_of(folder, ["t20 t21"])
    assert np.isfinite(vectors_of(runner_of(folder), ids, prompt_tokens=40)).all()


def test_settings_override_pooling_and_normalize(tmp_path: Path) -> None:
    mean = build_t(tmp_path / "mean")
    ids = ids_of(mean, TEXTS)
    cls = vectors_of(runner_of(build_t(tmp_path / "cls", pooling=["cls"], normalize=False)), ids)
    assert np.array_equal(vectors_of(runner_of(mean, pooling="cls", normalize=False), ids), cls)
    unit = vectors_of(runner_of(tmp_path / "cls", normalize=True), ids)
    assert np.abs(unit - cls / np.linalg.norm(cls, axis=1, keepdims=True)).max() <= 1e-6


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    folder = build_t(tmp_path / "t", initializer_range=0.02)
    vectors = vectors_of(runner_of(folder, dtype="bfloat16"), ids_of(folder, TEXTS))
    assert runner_of(folder, dtype="bfloat16").facts.dtype == "bfloat16"
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() <= 1e-6
    assert (vectors * reference_vectors(folder, TEXTS)).sum(axis=1).min() >= 0.9995


@pytest.mark.parametrize("build", [build_t, build_x, build_l])
@pytest.mark.parametrize("place", [0, 7])
def test_neighbours_do_not_change_a_vector(tmp_path: Path, build: Callable[[Path], Path], place: int) -> None:
    folder = build(tmp_path / "model")
    runner = runner_of(folder)
    longest = runner.facts.max_seq_len - 2
    text = "t10 t11"
    neighbours = [" ".join(f"t{10 + row + word}" for word in range(longest)) for row in range(7)]
    alone = vectors_of(runner, ids_of(folder, [text]))[0]
    together = vectors_of(runner, ids_of(folder, [*neighbours[:place], text, *neighbours[place:]]))[place]
    assert np.abs(alone - together).max() <= 1e-5


def test_nan_fails_its_own_input_only(tmp_path: Path) -> None:
    folder = build_n(tmp_path / "n")
    runner = runner_of(folder)
    texts = ["t10 t11", "t12 t99", "t13 " * 20, "t99"]
    outcome = runner.run([Input(each) for each in ids_of(folder, texts)])
    assert [(each.index, each.code) for each in outcome.failures] == [
        (1, ErrorCode.NON_FINITE_OUTPUT),
        (3, ErrorCode.NON_FINITE_OUTPUT),
    ]
    batch = outcome.encoded_batch()
    assert batch.row_values == [HIDDEN, 0, HIDDEN, 0]
    sound = vectors_of(runner, ids_of(folder, [texts[0], texts[2]]))
    assert np.abs(batch.values.reshape(2, -1) - sound).max() <= 1e-5


def test_the_bundled_model(minilm_folder: Path) -> None:
    """A real model over all lengths that it takes; its tokenizer ships with padding and truncation at 128 switched on."""
    texts = mixed_texts(20, longest=256)
    ids = ids_of(minilm_folder, texts)
    assert (min(map(len, ids)), max(map(len, ids))) == (3, 256)
    runner = runner_of(minilm_folder)
    assert (runner.facts.dimension, runner.facts.max_seq_len, runner.facts.vocabulary_rows) == (384, 256, 30_522)
    assert np.abs(vectors_of(runner, ids) - reference_vectors(minilm_folder, texts)).max() <= 1e-5
