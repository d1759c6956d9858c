"""What model folders say is checked, and every mistake in one is told in one line that names the file."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packhorse_shared.errors import ModelFilesError, PackhorseError, SettingsError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.model_folder import TokenLimit, read_model_folder
from packhorse_worker.engine.files.modules import Normalize, Pooling
from packhorse_worker.engine.limits import find_max_seq_len
from packhorse_worker.engine.memory import auto_num_tokens
from reference import ids_of, runner_of, vectors_of
from tiny_models import build_l, build_t, build_x, write_json


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_t(tmp_path_factory.mktemp("models") / "t")


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy of T to spoil."""
    return Path(shutil.copytree(built, tmp_path / "t"))


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    write_json(path, {key: value for key, value in {**content, **changes}.items() if value is not ...})


def set_modules(folder: Path, *kinds: str) -> None:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    types = [kind if "." in kind else f"sentence_transformers.models.{kind}" for kind in kinds]
    modules = [
        {"idx": 0, "name": "0", "path": paths.get(kind, "x"), "type": each} for kind, each in zip(kinds, types, strict=True)
    ]
    write_json(folder / "modules.json", modules)


def add_dense(folder: Path, **changes: Any) -> None:
    set_modules(folder, "Transformer", "Pooling", "Dense")
    config = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh", **changes}
    write_json(folder / "2_Dense" / "config.json", config)
    save_file({"linear.weight": torch.ones(8, 32), "linear.bias": torch.ones(8)}, folder / "2_Dense" / "model.safetensors")


def drop_tensors(folder: Path, part: str) -> None:
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if part not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_adapter_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.attention.self.query.lora_A.weight"] = torch.ones(4, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:count])


SPOILS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    ("broken config", lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
    ("config a list", lambda f: (f / "config.json").write_text("[]"), r"config\.json holds a list"),
    ("broken modules", lambda f: (f / "modules.json").write_text("nope"), r"modules\.json is not JSON"),
    ("empty modules", lambda f: write_json(f / "modules.json", []), r"modules\.json is not a list of modules"),
    ("odd entry", lambda f: write_json(f / "modules.json", [{"path": ""}]), r"modules\.json: an entry without type"),
    (
        "unknown module",
        lambda f: set_modules(f, "Transformer", "Pooling", "CNN"),
        r"modules\.json: module 2 is a sentence_transformers\.models\.CNN",
    ),
    ("own code", lambda f: set_modules(f, "custom_st.Transformer"), r"modules\.json: module type custom_st\.Transformer"),
    ("no transformer", lambda f: set_modules(f, "Pooling"), r"modules\.json: the first module is a .*Pooling"),
    ("no pooling", lambda f: set_modules(f, "Transformer", "Normalize"), r"modules\.json has no Pooling module"),
    ("late pooling", lambda f: set_modules(f, "Transformer", "Normalize", "Pooling"), r"modules\.json has a Pooling"),
    (
        "path out of the folder",
        lambda f: write_json(f / "modules.json", [{"type": "sentence_transformers.models.Transformer", "path": "../x"}]),
        r"modules\.json: path \.\./x leads out",
    ),
    ("no pooling config", lambda f: (f / "1_Pooling/config.json").unlink(), r"1_Pooling/config\.json is missing"),
    (
        "odd pooling",
        lambda f: write_json(f / "1_Pooling/config.json", {"pooling_mode": "median"}),
        r"1_Pooling/config\.json: pooling_mode 'median'",
    ),
    (
        "odd include_prompt",
        lambda f: change(f / "1_Pooling/config.json", include_prompt="no"),
        r"1_Pooling/config\.json: include_prompt is 'no'",
    ),
    (
        "odd activation",
        lambda f: add_dense(f, activation_function="os.system"),
        r"2_Dense/config\.json: activation_function os\.system",
    ),
    ("dense size", lambda f: add_dense(f, in_features=31), r"2_Dense/config\.json: in_features is 31, .* 32"),
    ("dense weights", lambda f: add_dense(f, out_features=9), r"2_Dense/model\.safetensors does not fit"),
    (
        "dense on tokens",
        lambda f: add_dense(f, module_input_name="token_embeddings"),
        r"2_Dense/config\.json: module_input_name token_embeddings",
    ),
    (
        "dense without weights",
        lambda f: (add_dense(f), (f / "2_Dense/model.safetensors").unlink()),
        r"2_Dense has no weights",
    ),
    (
        "sparse encoder",
        lambda f: change(f / "config_sentence_transformers.json", model_type="SparseEncoder"),
        r"config_sentence_transformers\.json: the model is a SparseEncoder, which is not served",
    ),
    (
        "default prompt",
        lambda f: change(f / "config_sentence_transformers.json", default_prompt_name="nope"),
        r"default_prompt_name nope is not among its prompts \(query, document\)",
    ),
    (
        "long prompt",
        lambda f: change(f / "config_sentence_transformers.json", prompts={"query": "x" * 9000}),
        r"say what cannot be served: .*8192",
    ),
    (
        "many prompts",
        lambda f: change(f / "config_sentence_transformers.json", prompts={f"p{n}": "x" * 1000 for n in range(70)}),
        r"config_sentence_transformers\.json: its prompts take \d+ bytes, limit 49152",
    ),
    (
        "another task",
        lambda f: change(f / "sentence_bert_config.json", transformer_task="fill-mask"),
        r"sentence_bert_config\.json: transformer_task fill-mask",
    ),
    (
        "another output",
        lambda f: change(f / "sentence_bert_config.json", modality_config={"image": {}}),
        r"sentence_bert_config\.json: modality_config has no text",
    ),
    (
        "odd limit",
        lambda f: change(f / "sentence_bert_config.json", max_seq_length="long"),
        r"sentence_bert_config\.json: max_seq_length is 'long'",
    ),
    (
        "odd matryoshka",
        lambda f: change(f / "config.json", matryoshka_dimensions=[8, "x"]),
        r"config\.json: matryoshka_dimensions",
    ),
    (
        "matryoshka in words",
        lambda f: change(f / "config.json", is_matryoshka="false"),
        r"config\.json: is_matryoshka is 'false', expected bool",
    ),
    ("matryoshka no list", lambda f: change(f / "config.json", matryoshka_dimensions=True), r"matryoshka_dimensions is True"),
    ("matryoshka texts", lambda f: change(f / "config.json", matryoshka_dimensions=["64"]), r"are not positive integers"),
    (
        "a chat template",
        lambda f: change(f / "sentence_bert_config.json", modality_config={"text": {}, "message": {}}),
        r"sentence_bert_config\.json: modality_config has a message entry",
    ),
    (
        "processing options",
        lambda f: change(f / "sentence_bert_config.json", processing_kwargs={"text": {"add_special_tokens": False}}),
        r"sentence_bert_config\.json: processing_kwargs sets add_special_tokens",
    ),
    (
        "model options",
        lambda f: change(f / "sentence_bert_config.json", model_args={"dtype": "float16", "default_task": "retrieval"}),
        r"sentence_bert_config\.json: model_kwargs sets default_task",
    ),
    (
        "query expansion",
        lambda f: change(f / "sentence_bert_config.json", query_expansion={"length": 32}),
        r"sentence_bert_config\.json: query_expansion is set",
    ),
    ("an adapter", lambda f: write_json(f / "adapter_config.json", {}), r"adapter_config\.json: the model is a PEFT adapter"),
    ("an adapter in the weights", add_adapter_weights, r"hold an adapter that is not merged"),
    ("broken tokenizer", lambda f: write_json(f / "tokenizer.json", {"model": 1}), r"tokenizer\.json cannot be read as a tok"),
    (
        "no tokenizer.json",
        lambda f: (f / "tokenizer.json").unlink(),
        r"tokenizer\.json is missing.*AutoTokenizer\.from_pretrained\(folder\)\.save_pretrained\(folder\)",
    ),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), r"has no weights"),
    ("cut weights", lambda f: cut(f / "model.safetensors", 60_000), r"model\.safetensors is cut short: 60000 bytes"),
    ("tiny weights", lambda f: cut(f / "model.safetensors", 5), r"model\.safetensors is not a whole safetensors file"),
    (
        "LFS pointer",
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"model\.safetensors is a Git LFS pointer",
    ),
    (
        "a missing shard",
        lambda f: (
            (f / "model.safetensors").unlink(),
            write_json(f / "model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors"}}),
        ),
        r"model-1\.safetensors is missing; model\.safetensors\.index\.json names it",
    ),
    (
        "pickle weights",
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"pytorch_model\.bin is a pickle.*--allow_pickle_weights",
    ),
    ("a missing layer", lambda f: drop_tensors(f, "layer.1.attention.self"), r"lack tensors: encoder\.layer\.1\.attention"),
    ("unknown architecture", lambda f: change(f / "config.json", model_type="nope"), r"cannot be loaded: .*nope"),
    (
        "own model code",
        lambda f: change(f / "config.json", model_type="nope", auto_map={"AutoModel": "m.M"}),
        r"own Python code \(auto_map\); --trust_remote_code",
    ),
    ("other sizes", lambda f: change(f / "config.json", intermediate_size=65), r"cannot be loaded|do not fit config\.json"),
]


@pytest.mark.parametrize(("spoil", "expected"), [each[1:] for each in SPOILS], ids=[each[0] for each in SPOILS])
def test_a_broken_folder_is_refused_in_one_line(folder: Path, spoil: Callable[[Path], Any], expected: str) -> None:
    spoil(folder)
    with pytest.raises(ModelFilesError, match=expected) as caught:
        runner_of(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_pooler_is_no_loss(folder: Path) -> None:
    ids = ids_of(folder, ["t10 t11"])
    before = vectors_of(runner_of(folder), ids)
    drop_tensors(folder, "pooler")
    assert (vectors_of(runner_of(folder), ids) == before).all()


def test_pickle_weights_load_when_allowed(folder: Path) -> None:
    ids = ids_of(folder, ["t10 t11"])
    before = vectors_of(runner_of(folder), ids)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert (vectors_of(runner_of(folder, allow_pickle_weights=True), ids) == before).all()


@pytest.mark.parametrize(
    ("build", "parts", "word"),
    [(build_t, (Pooling(("mean",)),), "mean"), (build_l, (Pooling(("lasttoken",)), Normalize()), "last token")],
)
def test_bare_transformers_get_a_pooling_and_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[Path], Path],
    parts: tuple[Any, ...],
    word: str,
) -> None:
    folder = build(tmp_path / "model")
    (folder / "modules.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert read_model_folder(folder, ModelSettings()).parts == parts
    assert [record.message for record in caplog.records if word in record.getMessage()]
    caplog.clear()
    assert read_model_folder(folder, ModelSettings(pooling="cls")).parts[0] == Pooling(("cls",))
    assert caplog.records == []


def test_bare_decoder_saved_for_generation_is_pooled_by_its_last_token(folder: Path) -> None:
    (folder / "modules.json").unlink()
    change(folder / "config.json", architectures=["SomeForCausalLM"])
    assert read_model_folder(folder, ModelSettings()).parts == (Pooling(("lasttoken",)), Normalize())
    change(folder / "config.json", use_bidirectional_attention=True)
    assert read_model_folder(folder, ModelSettings()).parts == (Pooling(("mean",)),)


def test_pooling_setting_stands_in_for_a_missing_module(folder: Path) -> None:
    set_modules(folder, "Transformer", "Normalize")
    assert read_model_folder(folder, ModelSettings(pooling="max")).parts == (Pooling(("max",)), Normalize())


def test_transformer_in_a_folder_of_its_own(folder: Path) -> None:
    """As sentence-transformers 1 saved it."""
    ids = ids_of(folder, ["t10 t11"])
    before = vectors_of(runner_of(folder), ids)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(inner / name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write_json(folder / "modules.json", modules)
    assert (vectors_of(runner_of(folder), ids) == before).all()


@pytest.mark.parametrize(
    ("companion", "tokenizer", "expected"),
    [
        ({"max_seq_length": 40}, 50, 40),
        ({"max_seq_length": None}, 50, 50),
        ({"max_seq_length": 1000}, 50, 64),
        ({"max_seq_length": 40, "tokenizer_args": {"model_max_length": 30}}, 50, 30),
        ({}, int(1e30), 64),
        ({}, ..., 64),
    ],
)
def test_max_seq_len_wherever_it_is_declared(folder: Path, companion: dict[str, Any], tokenizer: Any, expected: int) -> None:
    write_json(folder / "sentence_bert_config.json", companion)
    change(folder / "tokenizer_config.json", model_max_length=tokenizer)
    assert runner_of(folder).facts.max_seq_len == expected


def test_limit_in_a_config_of_an_older_name(folder: Path) -> None:
    (folder / "sentence_bert_config.json").unlink()
    write_json(folder / "sentence_xlm-roberta_config.json", {"max_seq_length": 17})
    assert runner_of(folder).facts.max_seq_len == 17


def test_roberta_positions_start_behind_the_padding_id(tmp_path: Path) -> None:
    folder = build_x(tmp_path / "x")
    runner = runner_of(folder)
    assert runner.facts.max_seq_len == 32
    vectors_of(runner, ids_of(folder, ["t10 " * 30]))


def test_asking_for_more_than_the_model_takes(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"max_seq_len: 65 is more than this model takes \(64, the position table\)"):
        runner_of(folder, max_seq_len=65)
    assert runner_of(folder, max_seq_len=63).facts.max_seq_len == 63


def test_a_declared_limit_may_be_raised_up_to_the_position_table(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As ``model.max_seq_length = 64`` does in sentence-transformers."""
    change(folder / "sentence_bert_config.json", max_seq_length=20)
    assert runner_of(folder).facts.max_seq_len == 20
    caplog.clear()
    runner = runner_of(folder, max_seq_len=64)
    assert runner.facts.max_seq_len == 64
    told = [record for record in caplog.records if "above the limit that the model declares" in record.getMessage()]
    assert [(record.levelname, record.__dict__["declared"]) for record in told] == [("WARNING", 20)]
    vectors_of(runner, ids_of(folder, ["t10 " * 62]))


def test_max_num_tokens_below_max_seq_len_is_told_with_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model's own limit stays what it is: workers with less memory must not pass for workers of another model."""
    with caplog.at_level(logging.WARNING):
        assert runner_of(folder, max_num_tokens=20).facts == runner_of(folder).facts
    assert len([record for record in caplog.records if "max_num_tokens" in record.getMessage()]) == 1


def test_a_setting_without_effect_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner_of(folder, cuda_graph_config={"batch_sizes": [1, 2]})
    assert [record.getMessage() for record in caplog.records if "cuda_graph_config has no effect" in record.getMessage()]


def test_without_any_limit_the_token_budget_is_the_limit() -> None:
    assert find_max_seq_len(None, None, None, 100) == 100
    assert find_max_seq_len(None, TokenLimit(70, "x"), None, 100) == 70
    assert find_max_seq_len(TokenLimit(70, "x"), None, None, 100) == 70
    assert find_max_seq_len(None, None, 30, 100) == 30


def test_float16_needs_a_gpu(folder: Path) -> None:
    with pytest.raises(SettingsError, match="dtype: float16 needs a GPU"):
        runner_of(folder, dtype="float16")


@pytest.mark.parametrize(
    ("declared", "setting", "expected"),
    [
        ({}, (), ((), False)),
        ({"matryoshka_dimensions": [8, 16, 64]}, (), ((8, 16), False)),
        ({"is_matryoshka": True}, (), ((), True)),
        ({"matryoshka_dimensions": [8]}, ("any",), ((), True)),
        ({"is_matryoshka": True}, ("4", "16"), ((4, 16), False)),
    ],
)
def test_matryoshka_sizes(folder: Path, declared: dict[str, Any], setting: tuple[str, ...], expected: Any) -> None:
    change(folder / "config.json", **declared)
    facts = runner_of(folder, matryoshka_dimensions=setting).facts
    assert (facts.matryoshka_dimensions, facts.matryoshka_any) == expected


@pytest.mark.parametrize("word", ["33", "0", "x", "-1"])
def test_matryoshka_setting_outside_the_model(folder: Path, word: str) -> None:
    with pytest.raises(PackhorseError, match=f"matryoshka_dimensions: {word} is not a size from 1 to 32"):
        runner_of(folder, matryoshka_dimensions=(word,))


def test_lowercase_only_where_the_tokenizer_does_not(folder: Path) -> None:
    assert not runner_of(folder).facts.lowercase
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    assert runner_of(folder).facts.lowercase
    change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})
    assert not runner_of(folder).facts.lowercase


def test_fingerprint_tells_what_is_served(folder: Path) -> None:
    first = runner_of(folder).facts.fingerprint
    assert runner_of(folder).facts.fingerprint == first
    others = [
        runner_of(folder, dtype="bfloat16").facts.fingerprint,
        runner_of(folder, pooling="cls").facts.fingerprint,
        runner_of(folder, normalize=False).facts.fingerprint,
        runner_of(folder, max_seq_len=10).facts.fingerprint,
    ]
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    others.append(runner_of(folder).facts.fingerprint)
    assert len({first, *others}) == 6


def test_auto_num_tokens_is_bounded_and_grows_with_memory() -> None:
    sizes = [auto_num_tokens(free << 20, 1024, 4096, 4) for free in (1, 1000, 2000, 100_000)]
    assert sizes[0] == 512
    assert 512 < sizes[1] < sizes[2] < sizes[3] == 16_384
    assert all(size % 64 == 0 for size in sizes)
