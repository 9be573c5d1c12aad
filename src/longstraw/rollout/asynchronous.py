"""One event loop for a run: clients, locks and sessions of a user's code belong to the loop that first used them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")


def wait_for(work: Awaitable[Result]) -> Result:
    """Runs it on the run's loop, whether or not this thread has a loop of its own; between calls, tasks go on there."""

    async def awaited() -> Result:
        return await work

    future = asyncio.run_coroutine_threadsafe(awaited(), _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # on Ctrl-C; of no effect on what is done
        raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="longstraw-async", daemon=True).start()
    return loop
