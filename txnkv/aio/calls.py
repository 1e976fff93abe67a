"""Blocking calls on the library's threads, awaited from event loops.

A handle for asyncio is made of twins: each method is named once, after the blocking one whose
arguments, answer and docstring it has.

    class AsyncTable(Wrapper[Table]):
        name: Same[str] = Same()            # what is at hand: answered here
        get = twin(Table.get)               # what may wait: called on a thread, awaited
        scan = ...                          # written out where the two differ

A twin that makes a handle gives it to `await`, and to `async with`, which closes it. One that makes
it `later` gives it at once, and the handle makes its blocking one at the first call, on a thread.

Handles for asyncio have `info`, or `timestamp`, as the blocking ones do, so that each of them
takes those of the other.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from functools import partial, wraps
from inspect import signature
from operator import attrgetter
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    overload,
)

from txnkv.errors import ClosedError
from txnkv.storage import (
    CachedProperty,
    SharedWeakSet,
    has_others_to_do,
    leak,
    new_lock,
    no_thread,
)
from txnkv.transaction import Handle

T = TypeVar("T")
H = TypeVar("H", bound=AbstractAsyncContextManager[Any])
B = TypeVar("B")
P = ParamSpec("P")

Method: TypeAlias = Callable[Concatenate[Any, P], T]
"""A method of a handle, not bound."""

Awaited: TypeAlias = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
"""Its twin."""

_THREADS: Final = min(32, (os.cpu_count() or 1) + 12)
_PATIENT: Final = 512
_LOOKS: Final = max(2, min(4, os.cpu_count() or 1))
_END: Final = object()


class _Later:
    """In the place of a blocking handle that is not made yet. Whoever reads an attribute before
    makes it, where that is.

    Args:
        by: calls `make`.
        make: gives the blocking handle.
    """

    def __init__(self, by: Callable[..., Any], make: partial[Any]) -> None:
        self._by, self._make = by, make

    @CachedProperty
    def here(self) -> Any:
        """The blocking handle."""
        return self._make()

    @property
    def is_made(self) -> bool:
        """It is there."""
        return "here" in vars(self)

    async def made(self) -> Any:
        """Make it on a thread."""
        return await self._by(lambda: self.here)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.here, name)

    def __repr__(self) -> str:
        return f"<{self._make.func.__name__.title()}, not made yet>"


class Wrapper(Handle, Generic[B]):
    """A handle for asyncio: it is called like the blocking one that it wraps."""

    def __init__(self, blocking: B, calls: Calls) -> None:
        self.blocking = blocking
        self._calls = calls
        self._call: Callable[..., Any] = calls

    def __repr__(self) -> str:
        return f"<Async{repr(self.blocking)[1:]}"

    async def _ready(self) -> Self:
        """Have the blocking handle made."""
        blocking: Any = self.blocking
        if isinstance(blocking, _Later):
            self.blocking = await blocking.made()
        return self

    def _itself(self) -> Generator[Any, Any, Self]:
        return self._ready().__await__()


class ClosingWrapper(Wrapper[B], ABC):
    """A handle with `close()`, usable in `async with`."""

    @abstractmethod
    async def close(self) -> None:
        """Give it up. Twice is fine."""

    async def __aenter__(self) -> Self:
        return await self._ready()

    async def __aexit__(self, *error: Any) -> None:
        await self.close()


class _Same:
    """A property that the blocking handle has too, and answers without waiting."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._of = attrgetter(f"blocking.{name}")

    def __get__(self, handle: Any, owner: type) -> Any:
        return self if handle is None else self._of(handle)


def same() -> Any:
    """Make such a property, of the type of its attribute: pyright matches no other to protocols."""
    return _Same()


class Opening(Coroutine[Any, Any, H]):
    """The coroutine that makes a handle, awaited for it or entered with `async with`."""

    def __init__(self, making: Coroutine[Any, Any, H]) -> None:
        self._making = making

    def send(self, value: Any) -> Any:
        return self._making.send(value)

    def throw(self, *error: Any) -> Any:
        return self._making.throw(*error)

    def close(self) -> None:
        self._making.close()

    def __await__(self) -> Generator[Any, Any, H]:
        return self._making.__await__()

    async def __aenter__(self) -> H:
        self._made = await self._making
        await self._made.__aenter__()
        return self._made

    async def __aexit__(self, *error: Any) -> None:
        await self._made.__aexit__(*error)


def opening(making: Callable[P, Coroutine[Any, Any, H]]) -> Callable[P, Opening[H]]:
    """Let `async with` enter what a method makes, without another `await`."""

    @wraps(making)
    def call(*args: P.args, **kwargs: P.kwargs) -> Opening[H]:
        return Opening(making(*args, **kwargs))

    return call


@overload
def twin(of: Method[P, T], *, by: str = ...) -> Awaited[P, T]: ...


@overload
def twin(
    of: Method[P, T], made: Callable[[T, Calls], H], *, by: str = ...
) -> Callable[Concatenate[Any, P], Opening[H]]: ...


@overload
def twin(
    of: Method[P, T], made: Callable[[T, Calls], H], *, by: str = ..., later: Literal[True]
) -> Callable[Concatenate[Any, P], H]: ...


def twin(of: Any, made: Any = None, *, by: str = "_call", later: bool = False) -> Any:
    """The method that does what `of` does, awaited.

    Args:
        of: a method of the blocking handle.
        made: makes a handle for asyncio of a blocking one that `of` gives.
        by: the attribute of the handle that calls.
        later: what `made` makes is given at once, and not awaited.
    """
    call_by, name = attrgetter(by), of.__name__

    @wraps(of, assigned=("__name__", "__doc__"))
    async def call(self: Wrapper[Any], *args: Any, **kwargs: Any) -> Any:
        if self.blocking.__class__ is _Later:
            if name == "close" and not self.blocking.is_made:
                return None  # there is nothing to give up
            await self._ready()
        found = await call_by(self)(getattr(self.blocking, name), *args, **kwargs)
        return found if made is None else made(found, self._calls)

    @wraps(of, assigned=("__name__", "__doc__"))
    def plan(self: Wrapper[Any], *args: Any, **kwargs: Any) -> Any:
        asked.bind(self, *args, **kwargs)
        kept = {option: _copied(value) for option, value in kwargs.items()}
        make = partial(getattr(self.blocking, name), *map(_copied, args), **kept)
        return made(_Later(call_by(self), make), self._calls)

    if made is None:
        return call
    given: Any = plan if later else call
    given.__signature__ = asked = signature(of).replace(return_annotation=made)
    return plan if later else opening(call)


def _copied(value: Any) -> Any:
    """An argument as it is now, whatever becomes of the lists in it."""
    if value.__class__ in (list, tuple, set):
        return value.__class__(map(_copied, value))
    return value


class _Threads(ThreadPoolExecutor):
    """Threads that do all they took: where the machine gives no more of them, those there are."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                self._work_queue.get_nowait()  # or a later thread would do what was refused
                raise no_thread(error) from error


class Calls:
    """The threads of one client.

    Args:
        threads: how many.
        may_wait: calls may wait while others have the right of way.
        patient: those of calls that wait for locks, so many that who has one finds a thread, or
            for another host.
        looks: those that look for messages on behalf of tasks that wait, few, so that many who are
            woken at once keep no thread from others; who would wait there goes to the patient.
    """

    def __init__(
        self,
        threads: int = _THREADS,
        *,
        may_wait: bool = False,
        patient: Calls | None = None,
        looks: Calls | None = None,
    ) -> None:
        begin = None if may_wait else has_others_to_do
        self._new = partial(_Threads, threads, "txnkv-aio", begin)
        self._pool = self._new()
        self._closed = False
        self.patient, self.looks = patient or self, looks or self
        _FORKABLE.add(self)

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call on a thread. Cancelled before it begins, it is not called.

        Raises:
            ClosedError: the client was closed.
        """
        return await asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    async def to_the_end(self, fn: Callable[..., T], *args: Any, begin: Any = None) -> T:
        """Call on a thread, and return when it has ended, even when this task is cancelled. After
        the client's end there is nothing to wait for, and it is called here.
        """
        if self._closed:
            return fn(*args)
        cancelled: asyncio.CancelledError | None = None
        inner: asyncio.Future[T] = asyncio.wrap_future((begin or self.submit)(fn, *args))
        while not inner.done():
            try:
                await asyncio.shield(inner)
            except asyncio.CancelledError as error:
                cancelled = error
            except BaseException:
                if not inner.done():  # the loop is closed, and the task with it
                    raise
        if cancelled is not None:
            inner.exception()  # known, whatever it was
            raise cancelled
        return inner.result()

    def submit(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Give a call to the threads."""
        self.require_open()
        return self._pool.submit(copy_context().run, fn, *args, **kwargs)

    def require_open(self) -> None:
        """Refuse what is called after the client's end."""
        if self._closed:
            raise ClosedError("the client was closed; connect again")

    @property
    def is_idle(self) -> bool:
        """No call waits for a thread."""
        return self._pool._work_queue.empty()

    async def each(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """Yield the items of an iterator that blocks, each taken on a thread."""
        while True:
            found: Any = await self(next, iterator, _END)
            if found is _END:
                return
            yield found

    def after_fork_in_child(self) -> None:
        """Begin with threads of its own: those there are have work of the parent's."""
        leak(self._pool)
        self._pool = self._new()

    def close(self) -> None:
        """Let the threads end when they have done what they were given."""
        for each in (self, self.patient, self.looks):
            each._closed = True
            each._pool.shutdown(wait=False)


def calls_of_a_client() -> Calls:
    """The threads of a client's calls, and those of calls that wait."""
    return Calls(patient=Calls(_PATIENT), looks=Calls(_LOOKS))


class _Call(Future[Any]):
    """A call that waits for its turn without a thread; the future of what it gives.

    Args:
        pool: whose threads make it.
        lines: in which it stands. It is made when it is the first in each of them.
    """

    def __init__(
        self, pool: Calls, lines: Sequence[_Line], fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        super().__init__()
        self.pool = pool
        self._lines = lines
        self._call = partial(copy_context().run, fn, *args, **kwargs)

    def begin(self) -> None:
        """Take a place at the end of the lines."""
        self.pool.require_open()
        with _IN_LINES:
            for line in self._lines:
                line.append(self)
            first = self.is_first
        if first:
            _hand_over([self])
        else:
            self.pass_by()

    def pass_by(self) -> None:
        """Wait no more for calls whose tasks take nothing, as their loops were closed."""
        with _IN_LINES:
            firsts = [line[0] for line in self._lines if line]
        for first in firsts:
            if isinstance(first, Kept) and first.is_left_behind:
                first.end()

    @property
    def is_first(self) -> bool:
        """It is its turn."""
        return all(line[0] is self for line in self._lines)

    def make(self) -> list[_Call]:
        """Make it, unless it was cancelled; return those whose turn it is then."""
        if not self.set_running_or_notify_cancel():
            return self._leave()
        try:
            found = self._call()
        except BaseException as error:
            ready = self._leave()  # first: who awaits this finds the line free
            self.set_exception(error)
            del self  # or the error would keep itself, by its traceback
            return ready
        ready = self._leave()
        self.set_result(found)
        return ready

    def found_thread(self) -> bool:
        """Give it to a thread of its pool; false where the client was closed, or none is left."""
        with suppress(Exception):
            self.pool.submit(_make, [self])
            return True
        return False

    def fail(self, error: Exception) -> list[_Call]:
        """Give it an error instead; return those whose turn it is then."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)
        return self._leave()

    def _leave(self) -> list[_Call]:
        return _passed_on(self._lines)


class Kept(_Call):
    """A call whose turn lasts until it was made, and its task has taken what it gave or dropped it:
    the next one finds out which.
    """

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        self._task_loop = asyncio.get_running_loop()
        self._ends = 2

    def end(self) -> None:
        """The task needs the turn no more. Call it once."""
        _hand_over(self._leave())

    @property
    def waits(self) -> bool:
        """Others are before it."""
        with _IN_LINES:
            return not self.done() and any(line and line[0] is not self for line in self._lines)

    @property
    def is_left_behind(self) -> bool:
        """It was made, for a task that takes nothing more."""
        return self.done() and self._task_loop.is_closed()

    def _leave(self) -> list[_Call]:
        with _IN_LINES:
            before, self._ends = self._ends, 0 if self._task_loop.is_closed() else self._ends - 1
        return super()._leave() if before > 0 and self._ends <= 0 else []


_Line: TypeAlias = deque[_Call | None]
"""Calls for one object, the first of which is under way; None is one in the thread of a loop."""

_IN_LINES: Final = new_lock()
"""Held for a moment, so that who stands in two lines has taken a place in both at once."""


def _passed_on(lines: Sequence[_Line]) -> list[_Call]:
    """Leave lines as the first one; return those whose turn it is then."""
    with _IN_LINES:
        for line in lines:
            if line:  # of a call before a fork nothing is left
                line.popleft()
        nexts = dict.fromkeys(line[0] for line in lines if line)
        return [each for each in nexts if each is not None and each.is_first]


def _hand_over(ready: list[_Call]) -> None:
    """Give calls whose turn it is to threads. They fail where there is none."""
    while ready:
        call = ready.pop()
        try:
            call.pool.submit(_make, [call])
        except Exception as error:
            ready += call.fail(error)


def _make(here: list[_Call]) -> None:
    """Make a call whose turn it is; then, here too, the one behind it, unless another call has to
    wait for that.

    Args:
        here: the call. It is taken out: an error keeps the frames below it, by its traceback.
    """
    pool = here[0].pool
    while here:
        ready = here.pop().make()
        if ready and not here and ready[0].pool is pool and pool.is_idle:
            here.append(ready.pop(0))
        here += [each for each in ready if not each.found_thread()]


class InTurn:
    """Calls for one object that one thread at a time may use, in the order in which they were made.

    Those that wait have no thread. One that was cancelled before its turn is not made; after it
    has begun it still runs, and the next one waits for it.

    Args:
        calls: the threads.
        turns: of several objects that each call uses, none of them quick; None: of one object.
    """

    def __init__(self, calls: Calls, turns: Sequence[InTurn] | None = None) -> None:
        self.calls = calls
        lines = [deque[_Call | None]()] if turns is None else [each._lines[0] for each in turns]
        self._lines: Sequence[_Line] = lines
        self._left: Future[Future[Any]] | None = None
        _FORKABLE.add(self)

    def after_fork_in_child(self) -> None:
        """Have nothing under way: the calls, and the tasks that wait for them, are the parent's."""
        if any(self._lines):
            for line in self._lines:
                leak(line.copy())  # or tasks would be closed here, and do what they do at their end
                line.clear()
            self._lines = [deque[_Call | None]() for _ in self._lines]
        self._left = None

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call on a thread."""
        return await asyncio.wrap_future(self._begun(fn, *args, **kwargs))

    def kept(self, calls: Calls, fn: Callable[..., Any], *args: Any) -> Kept:
        """Call on a thread of these, in the turn of this task until it says that it has ended."""
        call = Kept(calls, self._lines, fn, args, {})
        call.begin()
        return call

    async def to_the_end(self, fn: Callable[..., T], *args: Any) -> T:
        """Call to the end, as `Calls.to_the_end`."""
        return await self.calls.to_the_end(fn, *args, begin=self._begun)

    async def quick(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call here what only touches memory; on a thread when other calls are under way."""
        line = (lines := self._lines)[0]
        with _IN_LINES:
            if free := not line:
                line.append(None)
        if not free:
            return await self(fn, *args, **kwargs)
        try:
            return fn(*args, **kwargs)
        finally:
            with _IN_LINES:
                if alone := len(line) == 1:
                    line.pop()
            if not alone:
                _hand_over(_passed_on(lines))

    async def submitted(self, fn: Callable[[], Future[T]]) -> T:
        """Call what gives a future, and wait for that. Cancelled, it is called and goes on."""
        call = self._begun(fn)
        try:
            future = await asyncio.shield(asyncio.wrap_future(call))
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self._left = call
            raise

    async def settled(self) -> None:
        """Wait for what was `submitted` and then cancelled."""
        if (left := self._left) is not None:
            await self.calls.patient(lambda: left.exception() or wait([left.result()]))

    def _begun(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        call = _Call(self.calls, self._lines, fn, args, kwargs)
        call.begin()
        return call


_FORKABLE: Final = SharedWeakSet[Calls | InTurn]()


def _after_fork_in_child() -> None:
    for each in _FORKABLE:
        each.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
