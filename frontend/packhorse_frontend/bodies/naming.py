"""How messages name the inputs of a request: by the field that they came in, and by their place in it where it held a list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Naming:
    """The fields that hold a request's inputs, in order, each with how many of them; None for one that is no list."""

    fields: tuple[tuple[str, int | None], ...]

    @classmethod
    def of(cls, field: str, count: int, *, listed: bool) -> Naming:
        """All inputs came in one field."""
        return cls(((field, count if listed else None),))

    def label(self, index: int) -> str:
        """``input``, or ``input[3]``."""
        field, place = self._find(index)
        return field if place is None else f"{field}[{place}]"

    def param(self, index: int) -> str:
        """The field alone: ``param`` of an error answer."""
        return self._find(index)[0]

    def _find(self, index: int) -> tuple[str, int | None]:
        for field, count in self.fields:
            size = 1 if count is None else count
            if index < size:
                return field, None if count is None else index
            index -= size
        raise IndexError(f"{index} more inputs than {self.fields}")
