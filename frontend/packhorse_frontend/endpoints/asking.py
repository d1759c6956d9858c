"""What an endpoint asks of the model: the seam between what is special to an endpoint and what all of them share.

An endpoint is an ``Endpoint``: the type of its body, which of its fields hold inputs, and a function that makes a ``Question``
of a body. ``encode_route.py`` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packhorse_frontend.bodies.inputs import IdLists, Texts, TokenizedInputs, read_input, read_texts
from packhorse_frontend.bodies.large_body import Fields
from packhorse_frontend.bodies.large_field import Inputs
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.endpoints.serving import Serving
from packhorse_frontend.exchange import Answer
from packhorse_frontend.rows import RowShape
from packhorse_frontend.tokens.pairs import PairWork
from packhorse_frontend.tokens.texts import TextWork

Body = bytes | Iterator[bytes]
"""A small answer, or the pieces of a large one."""


@dataclass(frozen=True)
class Asked:
    """A body that was read: ``request`` is its type, and ``found`` the inputs of a large body, by field."""

    request: Any
    serving: Serving
    found: Mapping[str, Inputs] = field(default_factory=dict)

    def inputs(self, name: str) -> Texts | IdLists:
        """Texts or ids, checked. Raises Problem (400)."""
        found = self.found.get(name)
        if found is not None:
            return found
        return read_input(getattr(self.request, name), name, self.serving.max_inputs, self.serving.model.vocabulary_rows)

    def text(self, name: str) -> str | None:
        """A single text, if there is one."""
        found = self.found.get(name)
        if found is not None:
            assert isinstance(found, Texts), name
            return found.texts[0]
        text: str | None = getattr(self.request, name)
        return text

    def texts(self, name: str) -> Texts:
        """Texts or documents, checked. Raises Problem (400)."""
        found = self.found.get(name)
        if found is not None:
            assert isinstance(found, Texts), name
            return found
        return read_texts(getattr(self.request, name), name, self.serving.max_inputs)


@dataclass(frozen=True)
class Question:
    """What a request asks for, checked as far as can be before its texts are tokenized."""

    work: TextWork | PairWork | TokenizedInputs
    naming: Naming
    shape: RowShape
    write: Callable[[Answer, TokenizedInputs], Body]
    """Makes the answer of the rows."""
    priority: int = 0
    scored: bool = False
    """Whether rows are wanted as scores, after the model's own activation."""


@dataclass(frozen=True)
class Endpoint:
    """One endpoint that encodes."""

    body: type[Any]
    fields: Fields
    """The fields of its body that hold inputs."""
    read: Callable[[Asked], Question]
    """Raises Problem."""
