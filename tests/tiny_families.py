"""One tiny random model of every family that is served, seed 7, each with a tokenizer of its kind.

Families differ where it can go wrong silently: positions counted from a padding id, relative or rotary positions, sliding
windows, causal or bidirectional attention, convolutions, experts, and what stands in the padded area.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import HIDDEN, ROWS, SIZES, save_tokenizer, save_transformer, write_parts

_ENCODER = {**SIZES, "max_position_embeddings": 64, "pad_token_id": 0}
_FROM_PAD = {**_ENCODER, "pad_token_id": 1}
_DECODER = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "bos_token_id": None,
}
_WINDOWED = {**_DECODER, "sliding_window": 6}
_T5 = {"vocab_size": ROWS, "d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
_DISTIL = {"vocab_size": ROWS, "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}
_FNET = {"vocab_size": ROWS, "hidden_size": HIDDEN, "num_hidden_layers": 2, "intermediate_size": 64, "pad_token_id": 0}
_GPT2 = {
    "vocab_size": ROWS,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
}
_DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "conv_kernel_size": 3,
}
_MODERN = {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}

FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # name: configuration class, its values, kind of tokenizer, pooling
    "bert": ("BertConfig", _ENCODER, "bert", "mean"),
    "roberta": ("RobertaConfig", _FROM_PAD, "roberta", "mean"),
    "mpnet": ("MPNetConfig", _FROM_PAD, "roberta", "mean"),
    "distilbert": ("DistilBertConfig", {**_DISTIL, "initializer_range": 0.2}, "bert", "cls"),
    "electra": ("ElectraConfig", {**_ENCODER, "embedding_size": 16}, "bert", "mean"),
    "albert": ("AlbertConfig", {**_ENCODER, "embedding_size": 16}, "bert", "mean"),
    "deberta-v2": ("DebertaV2Config", {**_ENCODER, **_DEBERTA}, "bert", "mean"),
    "modernbert": ("ModernBertConfig", {**_ENCODER, **_MODERN, "bos_token_id": 2, "eos_token_id": 3}, "bert", "cls"),
    "nomic-bert": ("NomicBertConfig", _ENCODER, "bert", "mean"),
    "jina-v3": ("JinaEmbeddingsV3Config", _FROM_PAD, "roberta", "mean"),
    "eurobert": ("EuroBertConfig", _DECODER, "decoder", "mean"),
    "xlnet": ("XLNetConfig", {"vocab_size": ROWS, "d_model": HIDDEN, "n_layer": 2, "n_head": 4, "d_inner": 64}, "bert", "mean"),
    "t5": ("T5Config", {**_T5, "decoder_start_token_id": 0}, "decoder", "mean"),
    "qwen2": ("Qwen2Config", _DECODER, "qwen", "lasttoken"),
    "qwen3": ("Qwen3Config", _DECODER, "decoder", "lasttoken"),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "decoder",
        "lasttoken",
    ),
    "llama": ("LlamaConfig", _DECODER, "decoder", "mean"),
    "mistral": ("MistralConfig", _WINDOWED, "decoder", "lasttoken"),
    "gemma2": ("Gemma2Config", _WINDOWED, "decoder", "lasttoken"),
    "gemma3": ("Gemma3TextConfig", {**_WINDOWED, "num_hidden_layers": 6}, "decoder", "mean"),
    "embeddinggemma": (
        "Gemma3TextConfig",
        {**_WINDOWED, "num_hidden_layers": 6, "use_bidirectional_attention": True},
        "decoder",
        "mean",
    ),
    "gpt2": ("GPT2Config", _GPT2, "decoder", "lasttoken"),
    "fnet": ("FNetConfig", {**_FNET, "max_position_embeddings": 64, "initializer_range": 0.2}, "bert", "mean"),
    "convbert": ("ConvBertConfig", {**_ENCODER, "embedding_size": HIDDEN, "conv_kernel_size": 5}, "bert", "mean"),
}

DISTURBED_BY_PADDING = {"fnet", "convbert"}
PADDED = {"mpnet", "deberta-v2", "xlnet", "t5", "gemma2", *DISTURBED_BY_PADDING}
"""Families that compute attention in their own way, or with a bias or a soft cap."""


def build_family(folder: Path, name: str, **changes: Any) -> Path:
    """The model of a family, not normalized. ``changes`` go into its configuration."""
    import transformers

    config_name, values, kind, pooling = FAMILIES[name]
    config = getattr(transformers, config_name)(**{**values, **changes})
    save_transformer(folder, transformers.AutoModel.from_config, config)
    _TOKENIZERS[kind](folder)
    write_parts(folder, pooling=(pooling,), normalize=False)
    return folder


def _bert_tokenizer(folder: Path) -> None:
    names = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    save_tokenizer(folder, names, "[CLS] $A [SEP]", ("[CLS]", "[SEP]"), unk="[UNK]", pad="[PAD]", longest=64)


def _roberta_tokenizer(folder: Path) -> None:
    names = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    save_tokenizer(folder, names, "<s> $A </s>", ("<s>", "</s>"), unk="<unk>", pad="<pad>", longest=64)


def _decoder_tokenizer(folder: Path) -> None:
    names = {"<pad>": 0, "<unk>": 1, "<eos>": 3}
    save_tokenizer(folder, names, "$A <eos>", ("<eos>",), unk="<unk>", pad="<pad>", longest=64, padding_side="left")


def _qwen_tokenizer(folder: Path) -> None:
    """Byte-level, with the end token put behind every text, as Qwen3-Embedding has it. transformers insists on this class."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import Qwen2TokenizerFast

    letters = sorted("tĠ0123456789")
    tokenizer = Tokenizer(models.BPE(vocab={letter: 10 + place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[end])
    Qwen2TokenizerFast(tokenizer_object=tokenizer, model_max_length=64).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


_TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "bert": _bert_tokenizer,
    "roberta": _roberta_tokenizer,
    "decoder": _decoder_tokenizer,
    "qwen": _qwen_tokenizer,
}
