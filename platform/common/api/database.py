"""The database, from async code.

Django's own `sync_to_async` keeps a thread for as long as the request lives. A request that
waits must keep neither a thread nor a connection, so here a call borrows both and gives
them back.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from django.db import close_old_connections

P = ParamSpec("P")
T = TypeVar("T")

# Fewer than the connection pool has, so that the console's own threads find one too.
WORKERS = 12
_workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="database")


async def run_db(func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that uses the database, without blocking the loop.

    The connection is given back when it returns: never return a lazy queryset.
    A caller that is cancelled leaves; the function still runs to its end.
    """
    return cast("T", await _submit(partial(func, *args, **kwargs)))


async def _submit(call: Callable[[], Any]) -> Any:
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_workers, context.run, _call_and_close, call)


def _call_and_close(call: Callable[[], T]) -> T:
    close_old_connections()
    try:
        return call()
    finally:
        # With CONN_MAX_AGE 0 this returns the thread's connection to the pool.
        close_old_connections()
