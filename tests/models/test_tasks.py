"""What a model is for follows from its own files: the task, the labels, the activation, and what is refused by name."""

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

from packhorse_shared.errors import ModelFilesError, SettingsError
from packhorse_shared.messages import ModelFacts
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.labels import told
from packhorse_worker.engine.files.model_folder import ModelFolder, read_model_folder
from packhorse_worker.engine.files.modules import Dense, LayerNorm, Normalize, Pooling, SequenceHead, TokenHead, YesNoHead
from packhorse_worker.engine.transformer import load_transformer
from reference import runner_of
from tiny_heads import HEADS, NO, YES, build_causal_reranker, build_cross_encoder, build_head, build_pooled_reranker
from tiny_models import build_l, write_json

_TASKS = {"xlm-r-reranker": "rerank", "qwen3-reward": "reward", "bert-token-reward": "token_reward"}
_TASKS["qwen3-token-reward"] = "token_reward"
_SIGMOID = "torch.nn.modules.activation.Sigmoid"


def read(folder: Path, **settings: Any) -> ModelFolder:
    return read_model_folder(folder, ModelSettings(**settings))


def load(folder: Path, **settings: Any) -> torch.nn.Module:
    return load_transformer(read(folder, **settings), ModelSettings(**settings), torch.device("cpu"), torch.float32)


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    write_json(path, {key: value for key, value in {**content, **changes}.items() if value is not ...})


def drop_tensors(folder: Path, part: str) -> None:
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if part not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds each model once. Only for reading."""
    root = tmp_path_factory.mktemp("models")
    builders: dict[str, Callable[[Path], Path]] = {
        "new": lambda path: build_cross_encoder(path, "new"),
        "causal": build_causal_reranker,
        "bare causal": lambda path: build_causal_reranker(path, "bare"),
        "pooled": build_pooled_reranker,
    }

    def get(name: str) -> Path:
        path = root / name.replace(" ", "-")
        if not path.exists():
            builders.get(name, lambda path: build_head(path, name))(path)
        return path

    return get


@pytest.fixture
def spoil(models: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies of the models to change."""
    return lambda name: Path(shutil.copytree(models(name), tmp_path / "model"))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_the_transformers_own(models: Callable[[str], Path], name: str) -> None:
    folder = read(models(name))
    assert (folder.task, folder.parts) == (_TASKS.get(name, "classify"), ())
    count = len(HEADS[name][3].get("id2label", ())) or HEADS[name][3]["num_labels"]
    expected = ("anger", "joy", "fear") if name == "bert-classifier" else tuple(f"LABEL_{each}" for each in range(count))
    assert folder.labels == expected
    is_token_head = name.endswith("token-reward")
    activation = "Sigmoid" if folder.task == "rerank" else "Identity"
    assert folder.head == (TokenHead(expected) if is_token_head else SequenceHead(expected, activation))
    assert folder.activation == activation
    assert type(load(models(name))).__name__ == folder.config["architectures"][0]


@pytest.mark.parametrize("form", ["before 4.0", "up to 5.3", "new"])
def test_cross_encoders_of_every_format(tmp_path: Path, form: str) -> None:
    from sentence_transformers import CrossEncoder

    folder = build_cross_encoder(tmp_path / "model", form)
    found = read(folder)
    assert (found.task, found.head) == ("rerank", SequenceHead(("LABEL_0",), "Identity"))
    reference = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    assert type(reference.activation_fn).__name__ == found.activation
    assert reference.num_labels == len(found.labels)
    assert type(load(folder)).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("place", "declared", "labels", "expected"),
    [
        (None, None, 1, "Sigmoid"),
        (None, None, 3, "Identity"),
        ("saved", _SIGMOID, 3, "Sigmoid"),
        ("saved", "torch.nn.Tanh", 1, "Tanh"),
        ("config", "torch.nn.modules.linear.Identity", 1, "Identity"),
        ("oldest", "torch.nn.modules.linear.Identity", 1, "Identity"),
        ("saved", "some.code.Activation", 1, "Sigmoid"),
        ("config", "some.code.Activation", 3, "Identity"),
    ],
)
def test_the_activation_is_the_one_that_sentence_transformers_takes(
    spoil: Callable[[str], Path], place: str | None, declared: str | None, labels: int, expected: str
) -> None:
    from sentence_transformers import CrossEncoder

    folder = spoil("new")
    change(folder / "config.json", id2label={str(number): f"L{number}" for number in range(labels)}, label2id=...)
    change(folder / "config_sentence_transformers.json", activation_fn=declared if place == "saved" else ...)
    if place == "config":
        change(folder / "config.json", sentence_transformers={"activation_fn": declared})
    elif place == "oldest":
        change(folder / "config.json", sbert_ce_default_activation_function=declared)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"classifier.weight": torch.ones(labels, 32), "classifier.bias": torch.zeros(labels)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = read(folder)
    assert (found.activation, found.task) == (expected, "rerank" if labels == 1 else "classify")
    assert type(CrossEncoder(str(folder), device="cpu", local_files_only=True).activation_fn).__name__ == expected


def test_an_activation_of_the_models_own_is_passed_over_with_a_warning_but_not_when_trusted(
    spoil: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = spoil("new")
    change(folder / "config_sentence_transformers.json", activation_fn="some.code.Activation")
    with caplog.at_level(logging.WARNING):
        assert read(folder).activation == "Sigmoid"
    assert [record.__dict__["activation"] for record in caplog.records] == ["some.code.Activation"]
    with pytest.raises(ModelFilesError, match=r"config_sentence_transformers\.json: the activation some\.code\.Activation"):
        read(folder, trust_remote_code=True)


def test_declared_cross_encoders_on_a_decoder_are_rerankers(spoil: Callable[[str], Path]) -> None:
    """As the sequence-classification copies of Qwen3-Reranker are."""
    folder = spoil("qwen3-reward")
    change(folder / "config.json", sentence_transformers={"activation_fn": _SIGMOID, "version": "4.2.0"})
    assert (read(folder).task, read(folder).activation) == ("rerank", "Sigmoid")


def test_the_causal_reranker_of_sentence_transformers(models: Callable[[str], Path]) -> None:
    folder = read(models("causal"))
    assert (folder.task, folder.parts, folder.labels) == ("rerank", (), ())
    assert folder.head == YesNoHead(YES, NO, "Sigmoid")
    assert (folder.prompts["web"], folder.default_prompt_name) == ("t20 t21", "web")
    assert type(load(models("causal"))).__name__ == "Qwen3ForCausalLM"


def test_a_score_of_one_token_alone(tmp_path: Path) -> None:
    assert read(build_causal_reranker(tmp_path / "new", single=True)).head == YesNoHead(YES, None, "Sigmoid")
    assert read(build_causal_reranker(tmp_path / "bare", "bare", single=True)).head == YesNoHead(YES, None, "Sigmoid")


def test_words_in_config_json_make_a_causal_reranker(spoil: Callable[[str], Path]) -> None:
    folder = spoil("bare causal")
    assert read(folder).head == YesNoHead(YES, NO, "Sigmoid")
    assert read(folder).task == "rerank"
    change(folder / "config.json", classifier_from_token=...)
    assert (read(folder).task, read(folder).parts) == ("embedding", (Pooling(("lasttoken",)), Normalize()))
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    assert read(folder).head == YesNoHead(YES, NO, "Sigmoid"), "as sentence-transformers takes it"


def test_tied_weights_of_a_language_model_are_not_missing(models: Callable[[str], Path]) -> None:
    """The file has no lm_head: it is the embedding table."""
    assert not [name for name in load_file(models("causal") / "model.safetensors") if "lm_head" in name]
    model: Any = load(models("causal"))
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_untied_weights_of_a_language_model_are_missed(tmp_path: Path) -> None:
    folder = build_causal_reranker(tmp_path / "model", "bare", tie_word_embeddings=False)
    load(folder)
    drop_tensors(folder, "lm_head")
    with pytest.raises(ModelFilesError, match=r"lack tensors: lm_head\.weight"):
        load(folder)


def test_a_cross_encoder_whose_head_is_in_modules_json(models: Callable[[str], Path]) -> None:
    folder = read(models("pooled"))
    assert (folder.task, folder.head, folder.labels, folder.activation) == ("rerank", None, ("LABEL_0",), "Sigmoid")
    assert [type(part) for part in folder.parts] == [Pooling, Dense, LayerNorm, Dense]


HEAD_TENSORS = [
    ("bert-classifier", "classifier", r"classifier\.bias, classifier\.weight"),
    ("bert-classifier", "pooler", r"bert\.pooler\.dense\.bias, bert\.pooler\.dense\.weight"),
    ("albert-classifier", "pooler", r"albert\.pooler\.bias, albert\.pooler\.weight"),
    ("deberta-v2-classifier", "pooler", r"pooler\.dense\.bias, pooler\.dense\.weight"),
    ("roberta-classifier", "out_proj", r"classifier\.out_proj\.bias, classifier\.out_proj\.weight"),
    ("qwen3-reward", "score", r"score\.weight"),
    ("bert-token-reward", "classifier", r"classifier\.bias, classifier\.weight"),
]


@pytest.mark.parametrize(("name", "part", "listed"), HEAD_TENSORS)
def test_a_head_without_weights_is_refused(spoil: Callable[[str], Path], name: str, part: str, listed: str) -> None:
    folder = spoil(name)
    drop_tensors(folder, part)
    with pytest.raises(ModelFilesError, match=rf"the weights in .* lack tensors: {listed}; these layers") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def set_modality(folder: Path, name: str, **entry: Any) -> None:
    path = folder / "sentence_bert_config.json"
    change(path, modality_config={name: {"method": "forward", "method_output_name": "logits", **entry}})


def add_module(folder: Path, kind: str) -> None:
    path = folder / "modules.json"
    modules = [*json.loads(path.read_text()), {"idx": 9, "name": "9", "path": "9_More", "type": kind}]
    write_json(path, modules)


def swap_outputs(folder: Path) -> None:
    for part, name in (("2_Dense", "scores"), ("4_Dense", "sentence_embedding")):
        change(folder / part / "config.json", module_output_name=name)


SPOILS: list[tuple[str, str, Callable[[Path], Any], str]] = [
    (
        "label gap",
        "bert-classifier",
        lambda f: change(f / "config.json", id2label={"0": "a", "2": "b"}),
        r"config\.json: id2label does not number its 2 labels",
    ),
    (
        "label keys",
        "bert-classifier",
        lambda f: change(f / "config.json", id2label={"a": "b"}),
        r"config\.json: id2label has keys that are not numbers",
    ),
    (
        "no labels",
        "bert-classifier",
        lambda f: change(f / "config.json", id2label={}),
        r"config\.json: id2label does not number its 0 labels",
    ),
    (
        "own reward model",
        "qwen3-reward",
        lambda f: change(f / "config.json", architectures=["Qwen2ForRewardModel"], auto_map={"AutoModel": "x.Y"}),
        r"config\.json: Qwen2ForRewardModel is a reward model of its own code",
    ),
    (
        "process reward model",
        "qwen3-reward",
        lambda f: change(f / "config.json", architectures=["Qwen2ForProcessRewardModel"]),
        r"config\.json: Qwen2ForProcessRewardModel is a reward model of its own code",
    ),
    (
        "unknown activation",
        "new",
        lambda f: change(f / "config_sentence_transformers.json", activation_fn="torch.nn.modules.activation.Softmax"),
        r"config_sentence_transformers\.json: the activation torch\.nn\.modules\.activation\.Softmax is not served",
    ),
    (
        "module behind a classifier",
        "new",
        lambda f: add_module(f, "sentence_transformers.models.Normalize"),
        r"modules\.json: a CrossEncoder of a transformer for sequence-classification with Normalize behind it",
    ),
    (
        "classifier as embedding",
        "new",
        lambda f: change(f / "config_sentence_transformers.json", model_type="SentenceTransformer"),
        r"modules\.json: a SentenceTransformer of a transformer for sequence-classification with nothing behind it",
    ),
    (
        "language model without score",
        "causal",
        lambda f: write_json(f / "modules.json", json.loads((f / "modules.json").read_text())[:1]),
        r"modules\.json: a CrossEncoder of a transformer for text-generation with nothing behind it",
    ),
    (
        "no score config",
        "causal",
        lambda f: (f / "1_LogitScore/config.json").unlink(),
        r"1_LogitScore/config\.json is missing",
    ),
    (
        "no true token",
        "causal",
        lambda f: change(f / "1_LogitScore/config.json", true_token_id=None),
        r"1_LogitScore/config\.json: true_token_id is None",
    ),
    (
        "token outside the vocabulary",
        "causal",
        lambda f: change(f / "1_LogitScore/config.json", false_token_id=128),
        r"1_LogitScore/config\.json: token 128 is none of the model's 128",
    ),
    (
        "score of something else",
        "causal",
        lambda f: change(f / "1_LogitScore/config.json", module_input_name="scores"),
        r"1_LogitScore/config\.json: module_input_name scores",
    ),
    (
        "task",
        "causal",
        lambda f: change(f / "sentence_bert_config.json", transformer_task="any-to-any"),
        r"sentence_bert_config\.json: transformer_task any-to-any is not served",
    ),
    (
        "output",
        "causal",
        lambda f: set_modality(f, "message", method_output_name="hidden_states"),
        r"sentence_bert_config\.json: modality_config has no text that gives logits",
    ),
    (
        "message format",
        "causal",
        lambda f: set_modality(f, "message", format="xml"),
        r"sentence_bert_config\.json: the format of a message is xml",
    ),
    (
        "cut by the template",
        "causal",
        lambda f: change(f / "sentence_bert_config.json", processing_kwargs={"chat_template": {"max_length": 9}}),
        r"sentence_bert_config\.json: processing_kwargs sets max_length",
    ),
    (
        "three words",
        "bare causal",
        lambda f: change(f / "config.json", classifier_from_token=["a", "b", "c"]),
        r"config\.json: classifier_from_token is \['a', 'b', 'c'\]",
    ),
    (
        "unknown word",
        "bare causal",
        lambda f: change(f / "config.json", classifier_from_token=["nein", "yes"]),
        r"config\.json names the token 'nein', which .*tokenizer\.json does not have",
    ),
    (
        "scores in the middle",
        "pooled",
        swap_outputs,
        r"modules\.json: a CrossEncoder ends in scores",
    ),
    (
        "no scores",
        "pooled",
        lambda f: change(f / "4_Dense/config.json", module_output_name="sentence_embedding"),
        r"modules\.json: a CrossEncoder ends in scores",
    ),
]


@pytest.mark.parametrize(("name", "change_it", "expected"), [each[1:] for each in SPOILS], ids=[each[0] for each in SPOILS])
def test_what_cannot_be_served_is_refused_in_one_line(
    spoil: Callable[[str], Path], name: str, change_it: Callable[[Path], Any], expected: str
) -> None:
    folder = spoil(name)
    change_it(folder)
    with pytest.raises(ModelFilesError, match=expected) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bert-classifier", "qwen3-reward", "bert-token-reward", "new", "causal", "pooled"])
@pytest.mark.parametrize(
    ("setting", "value"), [("pooling", "mean"), ("normalize", True), ("normalize", False), ("matryoshka_dimensions", ("any",))]
)
def test_settings_for_embeddings_are_refused_with_the_models_task(
    models: Callable[[str], Path], name: str, setting: str, value: Any
) -> None:
    task = read(models(name)).task
    with pytest.raises(SettingsError, match=rf"^{setting}: .* task is {task} \(.*config\.json\)") as caught:
        read(models(name), **{setting: value})
    assert caught.value.name == setting


def test_what_a_head_declares_for_embeddings_is_left_alone(spoil: Callable[[str], Path]) -> None:
    folder = spoil("bert-classifier")
    change(folder / "config.json", matryoshka_dimensions=[2], is_matryoshka=True)
    assert (read(folder).matryoshka_dimensions, read(folder).matryoshka_any) == ((), False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"id2label": {"1": "b", "0": "a", "10": "k", **{str(n): "x" for n in range(2, 10)}}}, ("a", "b", *"xxxxxxxx", "k")),
        ({"id2label": ..., "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": ...}, ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": 7, "1": True}}, ("7", "True")),
    ],
)
def test_labels_are_in_the_order_of_the_logits(
    spoil: Callable[[str], Path], changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    from transformers import AutoConfig

    folder = spoil("bert-classifier")
    change(folder / "config.json", label2id=..., **changes)
    assert read(folder).labels == expected
    declared = AutoConfig.from_pretrained(folder).id2label
    assert tuple(str(declared[number]) for number in range(len(declared))) == expected


@pytest.mark.parametrize(
    ("labels", "is_told"),
    [
        (tuple(f"LABEL_{number}" for number in range(1500)), True),
        (tuple(f"LABEL_{number}" for number in range(2000)), False),
        (("x" * 256, "y"), True),
        (("x" * 257, "y"), False),
        (("\u00e9" * 200,) * 41, False),
        ((), True),
    ],
)
def test_labels_are_told_all_or_not_at_all(labels: tuple[str, ...], caplog: pytest.LogCaptureFixture, *, is_told: bool) -> None:
    with caplog.at_level(logging.WARNING):
        assert told(labels) == (labels if is_told else ())
    assert len(caplog.records) == (not is_told)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert-classifier", ("classify", 3, ("anger", "joy", "fear"), "Identity")),
        ("xlm-r-reranker", ("rerank", 1, ("LABEL_0",), "Sigmoid")),
        ("qwen3-reward", ("reward", 1, ("LABEL_0",), "Identity")),
        ("qwen3-token-reward", ("token_reward", 2, ("LABEL_0", "LABEL_1"), "Identity")),
        ("causal", ("rerank", 1, (), "Sigmoid")),
        ("pooled", ("rerank", 1, ("LABEL_0",), "Sigmoid")),
    ],
)
def test_the_facts_tell_the_task(models: Callable[[str], Path], name: str, expected: tuple[Any, ...]) -> None:
    facts = runner_of(models(name)).facts
    assert isinstance(facts, ModelFacts)
    assert (facts.task, facts.dimension, facts.labels, facts.activation) == expected


def test_usable_positions_of_a_roberta_with_a_head(models: Callable[[str], Path]) -> None:
    """64 rows, of which the first two are for padding."""
    assert runner_of(models("xlm-r-reranker")).facts.max_seq_len == 62


def test_the_head_is_part_of_the_fingerprint(spoil: Callable[[str], Path]) -> None:
    folder = spoil("new")
    first = runner_of(folder).facts.fingerprint
    change(folder / "config_sentence_transformers.json", activation_fn=_SIGMOID)
    assert runner_of(folder).facts.fingerprint != first


@pytest.mark.parametrize(("name", "is_served"), [("T5ForSequenceClassification", False), ("T5ForTokenClassification", True)])
def test_only_the_encoder_of_t5_can_have_a_head(tmp_path: Path, name: str, *, is_served: bool) -> None:
    import transformers

    from tiny_families import build_family
    from tiny_models import save_transformer

    folder = build_family(tmp_path / "t5", "t5")
    (folder / "modules.json").unlink()
    config = transformers.T5Config.from_pretrained(folder)
    save_transformer(folder, getattr(transformers, name), config)
    if is_served:
        assert type(load(folder)).__name__ == name
        return
    with pytest.raises(ModelFilesError, match=r"config\.json: model_type t5 is an encoder-decoder"):
        load(folder)


def test_a_saved_language_model_stays_an_embedding_without_a_word_of_reranking(tmp_path: Path) -> None:
    """Qwen3-Embedding says ForCausalLM too."""
    folder = build_l(tmp_path / "l")
    change(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    assert read(folder).task == "embedding"
    (folder / "modules.json").unlink()
    assert (read(folder).task, read(folder).parts) == ("embedding", (Pooling(("lasttoken",)), Normalize()))
