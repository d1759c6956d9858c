"""Small tokenizers of the kinds that models have, trained on a few sentences."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, World! It's the 2nd of 3 tests. where is the horse?",
    "Ein Pferd trägt die Last, caf\u00e9 na\u00efve \u00c0\u00c9 \u0130stanbul \u03a3\u0391\u03a3 \ufb01ne \uff11\uff12\uff13",
    "日本語のテキスト 中文 한국어 العربية, query: passage: numbers 1234 5.6 don't we'll",
]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def template(tokenizer: Tokenizer, single: str, pair: str | None = None) -> Tokenizer:
    """With the special tokens of a template for one text, and perhaps one for two."""
    words = [word.partition(":")[0] for word in f"{single} {pair or ''}".split() if not word.startswith("$")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(word, tokenizer.token_to_id(word)) for word in dict.fromkeys(words)]
    )
    return tokenizer


def word_piece(*, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=BERT, show_progress=False))
    return template(tokenizer, "[CLS] $A [SEP]")


def byte_level(special: list[str], single: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return template(tokenizer, single)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=ROBERTA, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return template(tokenizer, "<s> $A </s>")


def metaspace_bpe(special: list[str]) -> Tokenizer:
    """Gemma's and Llama's kind: BPE over text in which spaces are marks, bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_previous")
    tokens = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _with(tokenizer: Tokenizer, processor: processors.PostProcessor | None) -> Tokenizer:
    tokenizer.post_processor = processor
    return tokenizer


def _bert_processor(tokenizer: Tokenizer) -> Tokenizer:
    return _with(tokenizer, processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)))


def _llama() -> Tokenizer:
    tokenizer = byte_level(["<|begin|>"], "$A")
    own = template(tokenizer, "<|begin|> $A", "<|begin|> $A <|begin|>:1 $B:1").post_processor
    return _with(tokenizer, processors.Sequence([processors.ByteLevel(trim_offsets=True), own]))


PAIR_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bert": lambda: template(word_piece(lowercase=True), "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "bert, older file": lambda: _bert_processor(word_piece(lowercase=False)),
    "roberta": lambda: _with(byte_level(ROBERTA, "$A"), processors.RobertaProcessing(("</s>", 2), ("<s>", 0))),
    "xlm-r": lambda: template(unigram(), "<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "modernbert": lambda: template(byte_level(BERT, "$A"), "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    "qwen": lambda: _with(byte_level(["<|endoftext|>"], "$A"), processors.ByteLevel(trim_offsets=False)),
    "nothing put around": lambda: _with(byte_level(["<|endoftext|>"], "$A"), None),
    "no template for pairs": lambda: template(word_piece(lowercase=True), "[CLS] $A [SEP]"),
    "llama": _llama,
    "t5": lambda: template(unigram(), "$A </s>", "$A </s> $B </s>"),
    "gemma": lambda: template(metaspace_bpe(["<bos>"]), "<bos> $A", "<bos> $A <bos>:1 $B:1"),
    "document first": lambda: template(word_piece(lowercase=True), "[CLS] $A [SEP]", "[CLS] $B:1 [SEP]:1 $A [SEP]"),
}
"""Every way of putting special tokens around two texts."""
