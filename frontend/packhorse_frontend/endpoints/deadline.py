"""The end of a request's time (``request_timeout``), wherever it is by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from packhorse_frontend.problems import Problem, from_failure
from packhorse_shared.messages import ErrorCode
from packhorse_shared.settings import HttpSettings


def timeout_message(http: HttpSettings) -> str:
    """What is told of a request whose time is over."""
    return f"the request was not done within {http.request_timeout:g} s (--request_timeout)"


def out_of_time(http: HttpSettings) -> Problem:
    """The 504."""
    return from_failure(ErrorCode.TIMEOUT, timeout_message(http), 0, None)


@asynccontextmanager
async def in_time(deadline: float, http: HttpSettings) -> AsyncIterator[None]:
    """Cancel the work within at ``deadline`` (of the event loop's clock). Raises Problem (504) then."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise out_of_time(http) from None
