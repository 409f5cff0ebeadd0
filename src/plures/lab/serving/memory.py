"""Memory of a server: what requests took is given back to the system, and does not pile up over days."""

import asyncio
import ctypes
from typing import Any

ARENA_MAX = -8  # its number in glibc's mallopt
ARENAS = 2
SECONDS_BETWEEN = 2.0


def share_pools() -> None:
    """Let all threads take memory from few pools: else each keeps the most that it ever needed.

    share_pools()  # once, before threads begin
    """
    if (library := _glibc()) is not None:
        library.mallopt(ARENA_MAX, ARENAS)


async def give_back(seconds: float = SECONDS_BETWEEN) -> None:
    """Return what was freed to the system, now and then, until cancelled.

        task = asyncio.create_task(give_back())

    Blocks of batches and pictures of all sizes leave holes between them, and glibc returns only the end of a pool by
    itself. Returning every block at once would slow the network by a tenth.
    """
    library = _glibc()
    while library is not None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(library.malloc_trim, 0)


def _glibc() -> Any:
    """Find the C library of this process, where it can do both; others are left as they are."""
    try:
        library = ctypes.CDLL(None)
        return library if library.mallopt and library.malloc_trim else None
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no such library
        return None
