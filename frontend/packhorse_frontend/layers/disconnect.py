"""Work that ends when its client leaves: plain handlers never hear of it, so the connection is watched beside the work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from packhorse_frontend.bodies.body import ClientGoneError

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. The work is cancelled, and ClientGoneError raised, once the client is gone.

    To be called after the whole body was received.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
        raise ClientGoneError from None
    finally:
        watcher.cancel()
