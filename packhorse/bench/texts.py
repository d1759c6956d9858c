"""The texts that are sent: sets made from a fixed list of words and a seed, the same in every run.

The words are short and common, so that nearly every tokenizer has each of them as one token: a set of 100 words is about 102
tokens. Texts are cut to nine tenths of the model's limit, which leaves room for those that it cuts in two.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

WORDS = tuple(
    """
    the of and to in for is on that by this with you it not or be are from at as your all have new more an was we will home
    can us about if page my has search free but our one other do no information time they site he up may what which their news
    out use any there see only so his when here business who web also now help get view online first been would how were
    services some these its like service than price date back top people had list name just over state year day into email two
    health world next used go work last most music data make them should product system city policy number such please
    available support message after best software then good video well where rights public books high school through each
    links she review years order very privacy book items company read group need many user said does set under general
    research university mail full map program life know games way days management part could great united hotel real item
    international center must store travel comments made development report off member details line terms before hotels did
    send right type because local those using results office education national car design take posted internet address
    community within states area want phone shipping reserved subject between forum family long based code show even black
    check special prices website index being women much sign file link open today technology south case project same pages
    version section own found sports house related security both county american photo game members power while care network
    down computer systems three total place end following download him without per access think north resources current posts
    big media law control water history pictures size art personal since including guide shop directory board location change
    white text small rating rate government children during return students
    """.split()
)
_MOST_MIXED_WORDS = 256
_QUERY_WORDS = 8

Lengths = Callable[[random.Random], int]


class TextSet(msgspec.Struct, frozen=True):
    """One set by name."""

    words: Lengths
    """Draws the number of words of one text."""
    inputs: int
    """Inputs a request, unless --inputs says otherwise."""
    description: str


SETS = {
    "short": TextSet(lambda source: source.randint(8, 16), 1, "8 to 16 words"),
    "mixed": TextSet(
        lambda source: min(_MOST_MIXED_WORDS, max(3, round(source.lognormvariate(3.7, 0.75)))),
        1,
        "log-normal, median 40 words, 3 to 256",
    ),
    "bulk": TextSet(lambda _source: 100, 32, "100 words"),
    "long": TextSet(lambda source: source.randint(200, 400), 1, "200 to 400 words"),
}


def most_words(max_seq_len: int | None) -> int:
    """Words that surely fit into the model; of a server that does not tell its limit, into 256 tokens."""
    return max(1, int(0.9 * ((max_seq_len or 256) - 2)))


class Texts:
    """An endless source of texts of one set, none longer than ``longest`` words."""

    def __init__(self, name: str, longest: int, seed: int) -> None:
        self._words = SETS[name].words
        self._longest = longest
        self._random = random.Random(f"{name} {seed}")  # noqa: S311 (not for secrets)

    def text(self, room: int = 0) -> str:
        """The next text. ``room`` words are left free for what shares the input with it."""
        count = max(1, min(self._words(self._random), self._longest - room))
        return " ".join(self._random.choices(WORDS, k=count))

    def query(self) -> str:
        """A short text, as people type into a search box: the second part of a pair has at least three quarters of the room."""
        count = max(1, min(_QUERY_WORDS, self._longest // 4))
        return " ".join(self._random.choices(WORDS, k=count))
