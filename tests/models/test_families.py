"""Every family that is served, in a batch of mixed lengths, against sentence-transformers one text at a time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.runner import Runner
from reference import Vectors, ids_of, reference_vectors, runner_of, texts_up_to, vectors_of
from tiny_families import DISTURBED_BY_PADDING, FAMILIES, PADDED, build_family
from tiny_models import ROWS, build_t, save_transformer

_FLOAT32_ONLY = {"xlnet", "fnet"}
"""transformers' code for them does not run in bfloat16 on a CPU."""
TEXTS = texts_up_to(14, 7)


@dataclass(frozen=True)
class Family:
    """A family's model, loaded once for all tests."""

    name: str
    folder: Path
    runner: Runner
    warnings: list[str]
    texts: list[str]
    ids: list[NDArray[np.int32]]
    expected: Vectors


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name = request.param
    folder = build_family(tmp_path_factory.mktemp("family") / name, name)
    told = logging.getLogger("packhorse_worker")
    seen = _Seen()
    told.addHandler(seen)
    try:
        runner = runner_of(folder)
    finally:
        told.removeHandler(seen)
    longest = min(runner.facts.max_seq_len, 64) - 2
    texts = [*texts_up_to(14, 7), *texts_up_to(longest, 3, seed=8)[1:]]
    texts = [text for text, each in zip(texts, ids_of(folder, texts), strict=True) if len(each) <= longest + 2]
    ids = ids_of(folder, texts)
    return Family(name, folder, runner, seen.warnings, texts, ids, reference_vectors(folder, texts))


class _Seen(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


def test_a_batch_gives_what_each_text_gives_alone(family: Family) -> None:
    assert len(set(map(len, family.ids))) > 5
    vectors = vectors_of(family.runner, family.ids)
    assert np.abs(vectors - family.expected).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01, "the tiny model tells its inputs apart"


def test_what_cannot_be_packed_is_padded(family: Family) -> None:
    assert family.runner.pipeline.is_packed == (family.name not in PADDED)
    assert ["equal length" in each for each in family.warnings] == [True] * (family.name in DISTURBED_BY_PADDING)


@pytest.mark.parametrize("place", ["alone", "first", "last", "between"])
def test_the_place_in_the_batch_makes_no_difference(family: Family, place: str) -> None:
    shortest, longest = (pick(range(len(family.ids)), key=lambda each: len(family.ids[each])) for pick in (min, max))
    others = [each for number, each in enumerate(family.ids) if number not in (shortest, longest)]
    for one in (shortest, longest):
        before = {"alone": [], "first": [], "last": others, "between": others[:3]}[place]
        after = {"alone": [], "first": others, "last": [], "between": others[3:]}[place]
        vectors = vectors_of(family.runner, [*before, family.ids[one], *after])
        assert np.abs(vectors[len(before)] - family.expected[one]).max() <= 1e-5


def test_equal_texts_beside_each_other_have_equal_vectors(family: Family) -> None:
    vectors = vectors_of(family.runner, [family.ids[3]] * 4 + [family.ids[0]] + [family.ids[3]])
    assert np.abs(vectors[[0, 1, 2, 3, 5]] - family.expected[3]).max() <= 1e-5


@pytest.mark.parametrize(("name", "is_causal"), [("qwen3", True), ("gemma3", True), ("embeddinggemma", False)])
def test_decoders_stay_causal_and_bidirectional_ones_bidirectional(tmp_path: Path, name: str, *, is_causal: bool) -> None:
    folder = build_family(tmp_path / name, name)
    first, other = (vectors_of(runner_of(folder, pooling="cls"), ids_of(folder, [text]))[0] for text in ("t10 t11", "t10 t12"))
    assert (np.abs(first - other).max() < 1e-6) == is_causal


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in _FLOAT32_ONLY])
def test_bfloat16_stays_near(tmp_path: Path, name: str) -> None:
    folder = build_family(tmp_path / name, name, initializer_range=0.02)
    ids = ids_of(folder, TEXTS)
    exact = vectors_of(runner_of(folder), ids)
    near = vectors_of(runner_of(folder, dtype="bfloat16"), ids)
    cosines = (near * exact).sum(axis=1) / np.linalg.norm(near, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosines.min() >= 0.9995
    assert near.tobytes() != exact.tobytes()


@pytest.mark.parametrize("name", sorted(_FLOAT32_ONLY))
def test_a_dtype_that_a_model_does_not_run_in_is_refused(tmp_path: Path, name: str) -> None:
    folder = build_family(tmp_path / name, name)
    with pytest.raises(ModelFilesError, match=r"the model cannot encode \d+ tokens in bfloat16: RuntimeError"):
        runner_of(folder, dtype="bfloat16")


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
        runner_of(folder)


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
    vectors = vectors_of(runner_of(folder), ids_of(folder, TEXTS))
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
    vectors = vectors_of(runner_of(folder), ids_of(folder, TEXTS))
    assert np.abs(vectors - reference_vectors(folder, TEXTS)).max() <= 1e-5


def test_vectors_of_another_size_than_declared_are_refused(tmp_path: Path) -> None:
    """OPT may project its last layer down, which its hidden_size does not tell."""
    import transformers

    folder = build_family(tmp_path / "l", "qwen3")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 16}
    config = transformers.OPTConfig(vocab_size=ROWS, max_position_embeddings=64, pad_token_id=0, **sizes)
    save_transformer(folder, transformers.AutoModel.from_config, config)
    with pytest.raises(ModelFilesError, match=r"gives vectors of 16 values, but its config\.json says 32"):
        runner_of(folder)


def test_more_tokens_than_embeddings_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_t(tmp_path / "t", vocab_size=100)
    runner_of(folder)
    told = [record for record in caplog.records if "more tokens than the model has embeddings" in record.getMessage()]
    assert [(record.__dict__["tokens"], record.__dict__["rows"]) for record in told] == [(128, 100)]
