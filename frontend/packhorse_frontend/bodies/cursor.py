"""A place in the bytes of a large body, moved on by steps that hold the interpreter for about a millisecond each."""

from __future__ import annotations

import re
from collections.abc import Callable

from packhorse_frontend.bodies.parsing import not_json
from packhorse_frontend.problems import Problem

SCALAR = re.compile(rb'[^ \t\r\n,\[\]{}"]*+')
# Whole characters and escapes only: half a surrogate pair is left for the next step.
TEXT = re.compile(rb'(?:[^"\\]++|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\[^u])*+')
_SKIPPED_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""Wrong escapes, too: whoever reads the text refuses them, and knows where they are as long as its end is found."""
_SPACE = re.compile(rb"[ \t\r\n]*+")
_FLAT = rb'[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"'
_INNER = re.compile(rb"(?:%b|\[(?:%b)*+\]|\{(?:%b)*+\})*+" % (_FLAT, _FLAT, _FLAT), re.DOTALL)
"""What may stand in a list or an object, as far as it holds no more than lists and objects without others in them."""


class AbandonedError(Exception):
    """Nobody waits for this body any more."""


class Cursor:
    """Goes through a body once; ``at`` is where it is. What it passes is not checked to be JSON."""

    step_bytes = 128 * 1024

    def __init__(self, body: bytes, is_abandoned: Callable[[], bool]) -> None:
        self.body = body
        self.at = 0
        self.is_abandoned = is_abandoned

    def peek(self) -> bytes:
        """The byte here; empty at the end."""
        return self.body[self.at : self.at + 1]

    def take(self, char: bytes) -> bool:
        """Pass this byte, if it is the one here."""
        if self.peek() != char:
            return False
        self.at += 1
        return True

    def run(self, pattern: re.Pattern[bytes]) -> int:
        """Take what the pattern matches, one step of it at most; returns its size. Raises AbandonedError."""
        if self.is_abandoned():
            raise AbandonedError
        found = pattern.match(self.body, self.at, self.at + self.step_bytes)
        size = found.end() - self.at if found else 0
        self.at += size
        return size

    def skip_space(self, check: Callable[[], None]) -> None:
        """Past white space. ``check`` is called after every step, and may raise."""
        while self.run(_SPACE) == self.step_bytes:
            check()

    def skip_text(self, check: Callable[[], None]) -> None:
        """Past a string; left where it is broken off."""
        self.at += 1
        while self.run(_SKIPPED_TEXT):
            check()
        self.take(b'"')

    def skip_value(self, check: Callable[[], None]) -> None:
        """Past a value of any kind; left where it is broken."""
        depth = 0
        while True:
            while depth and self.run(_INNER):
                check()
            char = self.peek()
            if char == b'"':
                self.skip_text(check)
            elif char in (b"[", b"{"):
                depth += 1
                self.at += 1
            elif char in (b"]", b"}"):
                depth -= 1
                self.at += 1
            elif depth or not self.run(SCALAR):
                return
            check()
            if depth <= 0:
                return

    def not_json(self, problem: str) -> Problem:
        """400: the body is broken here."""
        return not_json(f"{problem} (byte {self.at})")
