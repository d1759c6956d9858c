"""The frontend's token ids are the ones that sentence-transformers makes, or the start says that they are not."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from packhorse_frontend.bodies.inputs import LengthRule
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.tokens.texts import TextTokenizer, TextWork, load_tokenizer
from packhorse_shared.errors import ModelFilesError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.model_folder import read_model_folder
from packhorse_worker.engine.tokenizer import check_tokenizer
from tiny_models import build_t, write_json, write_parts
from trained_tokenizers import BERT, ROBERTA, byte_level, unigram, word_piece

TEXTS = [
    "hello world",
    "Hello WORLD Caf\u00e9, \u0130stanbul \u03a3\u0391\u03a3 \ufb01 \uff11\uff12\uff13",
    "",
    "  two  spaces \t tab\n newline ",
    "日本語 中文テキスト 한국어",
    "[SEP] x [CLS] <s> y </s> <pad> <mask> <|endoftext|>",
    "a" * 300,
    "the fox " * 60,
    "\u200b\u00a0x\u3000y e\u0301",
    "🙂👍🏽 emoji",
    "don't . , ! can't",
    "\x00ctl\x07",
]


def save(folder: Path, tokenizer: Tokenizer, model_type: str, tokenizer_class: str, **config: Any) -> Path:
    """A folder with all but weights."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class, "model_max_length": 64, **config})
    write_json(folder / "config.json", {"model_type": model_type, "vocab_size": 400})
    write_parts(folder, pooling=("mean",), normalize=True)
    return folder


KINDS: dict[str, tuple[Callable[[], Tokenizer], str, str, dict[str, Any]]] = {
    "word piece": (lambda: word_piece(lowercase=True), "bert", "BertTokenizer", {}),
    "word piece, cased": (lambda: word_piece(lowercase=False), "bert", "BertTokenizer", {"do_lower_case": False}),
    "byte-level": (lambda: byte_level(ROBERTA, "<s> $A </s>"), "roberta", "RobertaTokenizer", {}),
    "unigram": (unigram, "xlm-roberta", "PreTrainedTokenizerFast", {"pad_token": "<pad>", "eos_token": "</s>"}),
    "modernbert": (lambda: byte_level(BERT, "[CLS] $A [SEP]"), "modernbert", "PreTrainedTokenizerFast", {"pad_token": "[PAD]"}),
    "end token behind": (
        lambda: byte_level(["<|endoftext|>", "<|im_end|>"], "$A <|endoftext|>"),
        "qwen3",
        "PreTrainedTokenizerFast",
        {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "padding_side": "left", "add_eos_token": False},
    ),
}


def served_ids(
    tokenizer: TextTokenizer, text: str, *, prompt: str = "", truncate_to: int | None = None, lowercase: bool = False
) -> list[int]:
    """Ids as the frontend makes them."""
    rule = LengthRule(limit=1_000, setting="max_seq_len", truncate_to=truncate_to)
    naming = Naming.of("input", 1, listed=False)
    work = TextWork([text], 0, naming, prompt=prompt, lowercase=lowercase, add_special_tokens=True, rule=rule)
    return tokenizer.tokenize(work, lambda: False).ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_transformers_own(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoTokenizer

    make, model_type, tokenizer_class, config = KINDS[kind]
    folder = save(tmp_path / "model", make(), model_type, tokenizer_class, **config)
    expected = AutoTokenizer.from_pretrained(folder)
    served = load_tokenizer(folder)
    for text in TEXTS:
        assert served_ids(served, text) == expected(text)["input_ids"], ascii(text)
        assert served_ids(served, text, truncate_to=7) == expected(text, truncation=True, max_length=7)["input_ids"], ascii(
            text
        )
        assert served_ids(served, text, prompt="query: ") == expected(f"query: {text}")["input_ids"], ascii(text)
    check_tokenizer(read_model_folder(folder, ModelSettings()), ModelSettings(), rows=400)
    assert [record for record in caplog.records if record.name.startswith("packhorse")] == []


@pytest.mark.parametrize("kind", ["word piece, cased", "byte-level", "unigram"])
def test_do_lower_case_lowers_as_sentence_transformers_does(tmp_path: Path, kind: str) -> None:
    """The text of a special token is left alone, and every letter is lowered for itself (a final sigma too)."""
    from sentence_transformers import SentenceTransformer

    make, _, tokenizer_class, config = KINDS[kind]
    folder = save(build_t(tmp_path / "model", vocab_size=400), make(), "bert", tokenizer_class, **config)
    shutil.copy(build_t(tmp_path / "config", vocab_size=400) / "config.json", folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    expected = SentenceTransformer(str(folder), device="cpu").tokenizer
    served = load_tokenizer(folder)
    for text in (*TEXTS, "[SEP] HELLO", "ΟΔΟΣ ΑΣ", "İ İ"):
        assert served_ids(served, text, lowercase=True) == expected(text)["input_ids"], ascii(text)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("word piece", {"do_lower_case": False}),
        ("word piece, cased", {"do_lower_case": True}),
        ("word piece", {"cls_token": "[MASK]"}),
        ("byte-level", {"add_prefix_space": True}),
    ],
)
def test_another_reading_of_plain_text_stops_the_start(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """And saving the tokenizer as the message says makes the two agree."""
    from transformers import AutoTokenizer

    make, model_type, tokenizer_class, config = KINDS[kind]
    folder = save(tmp_path / "model", make(), model_type, tokenizer_class, **{**config, **changes})
    found = read_model_folder(folder, ModelSettings())
    with pytest.raises(
        ModelFilesError, match=r"tokenizer\.json makes \[\d.*tokenizer_config\.json too, makes .*save_pretrained"
    ):
        check_tokenizer(found, ModelSettings(), rows=400)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    check_tokenizer(found, ModelSettings(), rows=400)


def test_options_in_sentence_bert_config_count_too(tmp_path: Path) -> None:
    make, model_type, tokenizer_class, config = KINDS["word piece"]
    folder = save(tmp_path / "model", make(), model_type, tokenizer_class, **config)
    write_json(folder / "sentence_bert_config.json", {"tokenizer_args": {"do_lower_case": False, "trust_remote_code": True}})
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json makes"):
        check_tokenizer(read_model_folder(folder, ModelSettings()), ModelSettings(), rows=400)


@pytest.mark.parametrize("changes", [{"strip_accents": False}, {"split_special_tokens": True}])
def test_another_reading_of_rare_text_warns(tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    make, model_type, tokenizer_class, config = KINDS["word piece"]
    folder = save(tmp_path / "model", make(), model_type, tokenizer_class, **{**config, **changes})
    with caplog.at_level(logging.WARNING):
        check_tokenizer(read_model_folder(folder, ModelSettings()), ModelSettings(), rows=400)
    assert len(caplog.records) == 1
    assert "different ids of a rare text" in caplog.records[0].getMessage()


def test_token_types_are_refused(tmp_path: Path) -> None:
    tokenizer = word_piece(lowercase=True)
    specials = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A:0 [SEP]:0 [CLS]:2", special_tokens=specials)
    types = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    folder = save(tmp_path / "model", tokenizer, "xlnet", "PreTrainedTokenizerFast", **types)
    with pytest.raises(ModelFilesError, match="token_type_ids other than 0"):
        check_tokenizer(read_model_folder(folder, ModelSettings()), ModelSettings(), rows=400)


def test_a_tokenizer_that_transformers_cannot_read_is_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, model_type, tokenizer_class, config = KINDS["word piece"]
    folder = save(tmp_path / "model", make(), model_type, tokenizer_class, **config)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class, "added_tokens_decoder": {"no id": {}}})
    check_tokenizer(read_model_folder(folder, ModelSettings()), ModelSettings(), rows=400)
    assert ["its ids were not compared" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("is_new_format", [False, True])
@pytest.mark.parametrize("prompt", ["query: ", "t20 t21 ", "t20", "t20 [SEP]"])
def test_prompt_tokens_are_counted_as_sentence_transformers_counts_them(
    tmp_path: Path, prompt: str, *, is_new_format: bool
) -> None:
    """From the text to the vector: frontend's ids and count, worker's pooling."""
    from sentence_transformers import SentenceTransformer

    from reference import runner_of, vectors_of

    folder = build_t(tmp_path / "t", normalize=False)
    write_parts(folder, pooling=("mean",), normalize=False, include_prompt=False)
    if is_new_format:
        SentenceTransformer(str(folder), device="cpu").save(str(tmp_path / "new"))
        shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)
        assert json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode"] == "mean"
    model = SentenceTransformer(str(folder), device="cpu")
    tokenizer = load_tokenizer(folder)
    count = tokenizer.count_prompt_tokens(prompt, lowercase=False, add_special_tokens=True)
    assert count == model.preprocess(["t30"], prompt=prompt)["prompt_length"]
    runner = runner_of(folder)
    for text in ("t30 t31 t32", "", " t30"):
        ids = np.array(served_ids(tokenizer, text, prompt=prompt), dtype=np.int32)
        vector = vectors_of(runner, [ids], prompt_tokens=count)[0]
        expected = model.encode(text, prompt=prompt, show_progress_bar=False)
        assert np.abs(vector - expected).max() <= 1e-5
