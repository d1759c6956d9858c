"""How many tokens a forward may hold while memory is short."""

from __future__ import annotations

_FORWARDS_TO_RECOVER = 64


class TokenBudget:
    """Tokens that one forward may have, padding included: halved when memory runs out, back after a while without trouble."""

    def __init__(self, tokens: int) -> None:
        self._full = tokens
        self._good = 0
        self.tokens = tokens

    def shrink(self, failed_tokens: int) -> None:
        """A forward of this size ran out of memory."""
        self.tokens = max(1, min(self.tokens, failed_tokens) // 2)
        self._good = 0

    def succeeded(self) -> None:
        """A forward went well."""
        if self.tokens < self._full:
            self._good += 1
            if self._good >= _FORWARDS_TO_RECOVER:
                self.tokens = min(self._full, self.tokens * 2)
                self._good = 0
