"""Blocking calls on the library's threads, awaited from event loops."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Self, TypeVar

from txnkv.errors import ClosedError
from txnkv.storage import new_lock
from txnkv.transaction import Handle

T = TypeVar("T")

_THREADS: Final = min(32, (os.cpu_count() or 1) + 12)
_END: Final = object()


class Wrapper(Handle):
    """A handle for asyncio: it is called like the blocking one that it wraps."""

    blocking: Any

    def __repr__(self) -> str:
        return f"<Async{repr(self.blocking)[1:]}"


class ClosingWrapper(Wrapper, ABC):
    """A handle with `close()`, usable in `async with`."""

    @abstractmethod
    async def close(self) -> None:
        """Give it up. Twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()


class Calls:
    """The threads of one client."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="txnkv-aio")
        self._closed = False

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call on a thread. Cancelled before it begins, it is not called.

        Raises:
            ClosedError: the client was closed.
        """
        return await asyncio.wrap_future(self._submit(fn, *args, **kwargs))

    async def to_the_end(self, fn: Callable[..., T], *args: Any) -> T:
        """Call on a thread, and return when it has ended, even when this task is cancelled."""
        return await _to_the_end(asyncio.wrap_future(self._submit(fn, *args)))

    def _submit(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        if self._closed:
            raise ClosedError("the client was closed; connect again")
        return self._pool.submit(fn, *args, **kwargs)

    async def each(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """Yield the items of an iterator that blocks, each taken on a thread."""
        while True:
            found: Any = await self(next, iterator, _END)
            if found is _END:
                return
            yield found

    def close(self) -> None:
        """Let the threads end when they have done what they were given."""
        self._closed = True
        self._pool.shutdown(wait=False)


async def _to_the_end(future: Awaitable[T]) -> T:
    inner = asyncio.ensure_future(future)
    cancelled: asyncio.CancelledError | None = None
    while not inner.done():
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        inner.exception()  # known, whatever it was
        raise cancelled
    return inner.result()


class InTurn:
    """Calls for one object that one thread at a time may use.

    A call that was cancelled after it began still runs; the next one waits for it, on its thread.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._lock = new_lock()

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call on a thread."""
        return await self._calls(self._alone, fn, args, kwargs)

    async def to_the_end(self, fn: Callable[..., T], *args: Any) -> T:
        """Call on a thread to the end, as `Calls.to_the_end`."""
        return await self._calls.to_the_end(self._alone, fn, args, {})

    async def quick(self, fn: Callable[..., T], *args: Any) -> T:
        """Call here what only touches memory; on a thread when another call is under way."""
        if not self._lock.acquire(blocking=False):
            return await self(fn, *args)
        try:
            return fn(*args)
        finally:
            self._lock.release()

    async def submitted(self, fn: Callable[[], Future[T]]) -> T:
        """Call what gives a future, and wait for that. Cancelled, the future goes on."""
        return await asyncio.wrap_future(await self(fn))

    def _alone(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        with self._lock:
            return fn(*args, **kwargs)
