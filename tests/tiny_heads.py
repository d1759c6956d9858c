"""Tiny random models with a head of their own, seed 7: classifiers, reward models, cross-encoders, a causal reranker.

Saved as transformers saves them, without modules.json, unless said otherwise. Each has a tokenizer of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_families import FAMILIES
from tiny_models import save_tokenizer, save_transformer, write_json

_EMOTIONS = {0: "anger", 1: "joy", 2: "fear"}
YES, NO = 6, 5
"""Token ids of ``yes`` and ``no`` in the causal reranker."""
CHAT_TEMPLATE = (
    "{%- for role, mark in [('system', 't40'), ('query', 't41'), ('document', 't42')] -%}"
    "{%- for message in messages if message.role == role -%}{{ mark + ' ' + message.content + ' ' }}{%- endfor -%}"
    "{%- endfor -%}{{ 't43' }}{%- if add_generation_prompt -%}{{ ' t44' }}{%- endif -%}"
)
"""``t40 <system> t41 <query> t42 <document> t43``, and ``t44`` as the generation prompt."""

HEADS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # name: family, auto class, kind of tokenizer, changes to the family's configuration
    "bert-classifier": ("bert", "SequenceClassification", "bert", {"id2label": _EMOTIONS}),
    "roberta-classifier": ("roberta", "SequenceClassification", "roberta", {"num_labels": 4}),
    "xlm-r-reranker": ("xlm-r", "SequenceClassification", "roberta", {"num_labels": 1}),
    "modernbert-classifier-cls": (
        "modernbert",
        "SequenceClassification",
        "bert",
        {"num_labels": 3, "classifier_pooling": "cls"},
    ),
    "modernbert-classifier-mean": (
        "modernbert",
        "SequenceClassification",
        "bert",
        {"num_labels": 3, "classifier_pooling": "mean"},
    ),
    "distilbert-classifier": ("distilbert", "SequenceClassification", "bert", {"num_labels": 2}),
    "albert-classifier": ("albert", "SequenceClassification", "bert", {"num_labels": 3}),
    "electra-classifier": ("electra", "SequenceClassification", "bert", {"num_labels": 3}),
    "mpnet-classifier": ("mpnet", "SequenceClassification", "roberta", {"num_labels": 3}),
    "deberta-v2-classifier": ("deberta-v2", "SequenceClassification", "bert", {"num_labels": 3}),
    "qwen3-reward": ("qwen3", "SequenceClassification", "decoder", {"num_labels": 1}),
    "bert-token-reward": ("bert", "TokenClassification", "bert", {"num_labels": 2}),
    "qwen3-token-reward": ("qwen3", "TokenClassification", "decoder", {"num_labels": 2}),
}


def build_head(folder: Path, name: str, **changes: Any) -> Path:
    """One of ``HEADS``. ``changes`` go into its configuration."""
    import transformers

    family, auto_class, kind, own = HEADS[name]
    config_name, values, _, _ = FAMILIES["roberta" if family == "xlm-r" else family]
    config_class = transformers.XLMRobertaConfig if family == "xlm-r" else getattr(transformers, config_name)
    config = config_class(**{**values, **own, **changes})
    save_transformer(folder, getattr(transformers, f"AutoModelFor{auto_class}").from_config, config)
    _TOKENIZERS[kind](folder)
    return folder


def build_cross_encoder(folder: Path, form: str, **changes: Any) -> Path:
    """A BERT cross-encoder with one label and token types, as sentence-transformers saves it.

    ``form``: ``before 4.0`` (the activation under the oldest key), ``up to 5.3`` (in a section of config.json), or ``new`` (by
    the installed version, with a modules.json). ``changes`` go into the transformer's configuration.
    """
    build_head(folder, "bert-classifier", id2label={0: "LABEL_0"}, **changes)
    identity = "torch.nn.modules.linear.Identity"
    match form:
        case "before 4.0":
            _add(folder / "config.json", sbert_ce_default_activation_function=identity)
        case "up to 5.3":
            _add(folder / "config.json", sentence_transformers={"activation_fn": identity, "version": "5.1.0"})
        case "new":
            save_again(folder, activation=identity)
    return folder


def build_causal_reranker(folder: Path, form: str = "new", *, single: bool = False, **changes: Any) -> Path:
    """A Qwen3 that answers yes or no behind a chat template.

    ``form``: ``new`` (by the installed sentence-transformers, with a LogitScore) or ``bare`` (``classifier_from_token`` in
    config.json). ``single``: the logit of yes alone.
    """
    import transformers

    config_name, values, _, _ = FAMILIES["qwen3"]
    config = getattr(transformers, config_name)(**{**values, "tie_word_embeddings": True, **changes})
    save_transformer(folder, transformers.AutoModelForCausalLM.from_config, config)
    _decoder_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    if form == "bare":
        _add(folder / "config.json", classifier_from_token=["yes"] if single else ["no", "yes"])
        return folder
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    processing = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(str(folder), transformer_task="text-generation", processing_kwargs=processing)
    modules = [transformer, LogitScore(YES, None if single else NO)]
    prompts = {"web": "t20 t21", "code": "t22"}
    CrossEncoder(modules=modules, device="cpu", prompts=prompts, default_prompt_name="web").save(str(folder))
    return folder


def build_pooled_reranker(folder: Path) -> Path:
    """A cross-encoder whose head is listed in modules.json: cls pooling, Dense, LayerNorm, and a Dense that gives the score."""
    import torch
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    from tiny_families import build_family

    build_family(folder, "modernbert")
    _bert_tokenizer(folder)
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        modules = [
            Transformer(str(folder)),
            Pooling(32, "cls"),
            Dense(32, 32, bias=False, activation_function=torch.nn.GELU()),
            LayerNorm(32),
            Dense(32, 1, activation_function=torch.nn.Identity(), module_output_name="scores"),
        ]
    CrossEncoder(modules=modules, device="cpu").save(str(folder))
    return folder


def save_again(folder: Path, activation: str | None = None) -> None:
    """Have the installed sentence-transformers load a cross-encoder and save it in its own format."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.util import import_from_string

    chosen = None if activation is None else import_from_string(activation)()
    CrossEncoder(str(folder), device="cpu", local_files_only=True, activation_fn=chosen).save(str(folder))


def _add(path: Path, **entries: Any) -> None:
    import json

    write_json(path, {**json.loads(path.read_text()), **entries})


def _bert_tokenizer(folder: Path) -> None:
    names = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    save_tokenizer(
        folder,
        names,
        "[CLS] $A [SEP]",
        ("[CLS]", "[SEP]"),
        unk="[UNK]",
        pad="[PAD]",
        longest=64,
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _roberta_tokenizer(folder: Path) -> None:
    names = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    pair = "<s> $A </s> </s> $B </s>"
    save_tokenizer(folder, names, "<s> $A </s>", ("<s>", "</s>"), unk="<unk>", pad="<pad>", longest=64, pair=pair)


def _decoder_tokenizer(folder: Path, **settings: Any) -> None:
    names = {"<pad>": 0, "<unk>": 1, "<eos>": 3}
    save_tokenizer(
        folder,
        names,
        "$A <eos>",
        ("<eos>",),
        unk="<unk>",
        pad="<pad>",
        longest=64,
        padding_side="left",
        pair="$A $B <eos>",
        words={"no": NO, "yes": YES},
        **settings,
    )


_TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "bert": _bert_tokenizer,
    "roberta": _roberta_tokenizer,
    "decoder": _decoder_tokenizer,
}
