"""Tiny random models with real fast tokenizers, seed 7, saved as sentence-transformers folders (format up to 5.3).

T: BERT, 128 rows, 64 positions, word-level, "t10 t11" -> [2, 10, 11, 3]. X: XLM-RoBERTa, 34 positions, pad id 1.
N: T with row 99 all NaN. L: Qwen3-style decoder, left padding, last-token pooling and normalize, EOS by the tokenizer.
S (``build_slow``): T as large as BERT-base.
Weights are initialized wide (0.2), so that a wrong mask, position or neighbour shows in the vectors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = 128
HIDDEN = 32
_SEED = 7
_WORDS = {f"t{number}": number for number in range(10, ROWS)}


def build_t(folder: Path, *, pooling: Sequence[str] = ("mean",), normalize: bool = True, **config: Any) -> Path:
    """T: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, "t<n>" n for n from 10 to 127; 64 positions."""
    from transformers import BertConfig, BertModel

    names = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    settings = {"max_position_embeddings": 64, "pad_token_id": 0, **SIZES, **config}
    save_transformer(folder, BertModel, BertConfig(**settings))
    longest = settings["max_position_embeddings"]
    save_tokenizer(folder, names, "[CLS] $A [SEP]", ("[CLS]", "[SEP]"), unk="[UNK]", pad="[PAD]", longest=longest)
    write_parts(folder, pooling=pooling, normalize=normalize, hidden=settings["hidden_size"])
    return folder


def build_slow(folder: Path) -> Path:
    """S: T as BERT-base (12 layers of 768), 512 positions: hundreds of milliseconds for a long input on a CPU."""
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    return build_t(folder, max_position_embeddings=512, initializer_range=0.02, **sizes)


def build_x(folder: Path, *, pooling: Sequence[str] = ("mean",), normalize: bool = True) -> Path:
    """X: <s> 0, <pad> 1, </s> 2, <unk> 3; a table of 34 positions, of which 32 can be used."""
    from transformers import XLMRobertaConfig, XLMRobertaModel

    config = XLMRobertaConfig(max_position_embeddings=34, pad_token_id=1, bos_token_id=0, eos_token_id=2, **SIZES)
    save_transformer(folder, XLMRobertaModel, config)
    names = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    save_tokenizer(folder, names, "<s> $A </s>", ("<s>", "</s>"), unk="<unk>", pad="<pad>", longest=34)
    write_parts(folder, pooling=pooling, normalize=normalize)
    return folder


def build_n(folder: Path) -> Path:
    """N: T whose embedding of "t99" is all NaN."""
    from safetensors.torch import load_file, save_file

    build_t(folder)
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][99] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_l(folder: Path) -> Path:
    """L: pad 0, unk 1, <eos> 3 appended by the tokenizer; left padding; 128 positions."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=3,
        bos_token_id=None,
        **SIZES,
    )
    save_transformer(folder, Qwen3Model, config)
    names = {"<pad>": 0, "<unk>": 1, "<eos>": 3}
    save_tokenizer(folder, names, "$A <eos>", ("<eos>",), unk="<unk>", pad="<pad>", longest=128, padding_side="left")
    write_parts(folder, pooling=("lasttoken",), normalize=True)
    return folder


def write_parts(
    folder: Path, *, pooling: Sequence[str], normalize: bool, include_prompt: bool = True, hidden: int = HIDDEN
) -> None:
    """The companion files of sentence-transformers up to 5.3, without a limit of their own."""
    modes = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    write_json(folder / "modules.json", modules)
    declared = {"word_embedding_dimension": hidden, **{key: mode in pooling for key, mode in modes.items()}}
    write_json(folder / "1_Pooling" / "config.json", {**declared, "include_prompt": include_prompt})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": None, "do_lower_case": False})
    versions = {"sentence_transformers": "5.1.0", "transformers": "4.56.0", "pytorch": "2.8.0"}
    prompts = {"query": "t20 t21 ", "document": ""}
    write_json(folder / "config_sentence_transformers.json", {"__version__": versions, "prompts": prompts})


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}


def save_transformer(folder: Path, model_class: Any, config: Any) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model_class(config).to(torch.float32).save_pretrained(folder)


def save_tokenizer(
    folder: Path,
    names: dict[str, int],
    template: str,
    specials: tuple[str, ...],
    *,
    unk: str,
    pad: str,
    longest: int,
    padding_side: str = "right",
    pair: str | None = None,
    words: dict[str, int] | None = None,
    **settings: Any,
) -> None:
    """``pair``: template of two texts. ``words``: more of them, below 10. ``settings`` of PreTrainedTokenizerFast."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {**names, **(words or {})}
    unused = {f"<unused{number}>": number for number in range(10) if number not in known.values()}
    tokenizer = Tokenizer(models.WordLevel({**known, **unused, **_WORDS}, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=pair, special_tokens=[(name, names[name]) for name in specials]
    )
    first, last = specials[0], specials[-1]
    named = {"cls_token": first, "sep_token": last} if len(specials) == 2 else {"eos_token": last}
    options = {"model_max_length": longest, "padding_side": padding_side, **named, **settings}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk, pad_token=pad, **options).save_pretrained(folder)
