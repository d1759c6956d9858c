"""Bodies to what they ask: a small one at once, a large one step by step in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from packhorse_frontend.bodies.body import LARGEST_INLINE_BYTES
from packhorse_frontend.bodies.large_body import Fields, read_large_body
from packhorse_frontend.bodies.large_field import InputLimits
from packhorse_frontend.bodies.parsing import BodyParser
from packhorse_frontend.endpoints.asking import Asked
from packhorse_frontend.endpoints.serving import Serving
from packhorse_frontend.state import FrontendState

T = TypeVar("T")


class BodyReader:
    """Reads the bodies of one type, whose ``fields`` hold inputs."""

    def __init__(self, state: FrontendState, body: type[Any], fields: Fields) -> None:
        self._state = state
        self._parser = BodyParser(body)
        self.fields = fields

    async def read(self, body: bytes, serving: Serving, use: Callable[[Asked], T]) -> T:
        """What ``use`` makes of the body; it is called where the body is read. Raises Problem (400, 404)."""
        if len(body) <= LARGEST_INLINE_BYTES:
            return use(self._checked(Asked(self._parser.parse(body), serving)))
        is_abandoned = threading.Event()

        def work() -> T:
            limits = InputLimits(serving.max_inputs, serving.model.vocabulary_rows)
            found = read_large_body(body, self._parser, self.fields, limits, is_abandoned.is_set)
            return use(self._checked(Asked(found[0], serving, found[1])))

        try:
            return await asyncio.get_running_loop().run_in_executor(self._state.body_reader, work)
        finally:
            is_abandoned.set()

    @staticmethod
    def _checked(asked: Asked) -> Asked:
        asked.serving.check_name(asked.request.model)
        return asked
