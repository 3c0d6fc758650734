"""Work that would hold up the streams, in a thread that lives no longer than it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own; return what it returns, raise what it raises.

    A pool would keep the thread. In a process that has a second one, even if it sleeps, the kernel
    counts a reference for each system call on a file, which all that is relayed pays for.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)
