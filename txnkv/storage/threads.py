"""Threads of the library: for calls that no signal handler interrupts, and for finalizers.

Python runs signal handlers in the main thread, between two instructions of whatever it runs. One
that raises (Ctrl-C in a notebook, a time limit by SIGALRM) ends that code anywhere: after BEGIN
and before the variable that would say so, in a `finally` clause, inside a lock's bookkeeping.
No order of instructions is safe against that, and masks of signals do not help either: another
thread takes the signal, and the main thread still runs the handler.

So no handler runs while the store is read or written. There are two ways, by how long that takes.

A **brief** call ends by itself, as soon as the disk lets it. Handlers are put off until its end
(csrc/native/handlers.c), which costs a tenth of a microsecond; where one raises then, that is the
outcome, and the result is dropped:

    main      brief call [ the call, whole ] KeyboardInterrupt is raised
    Ctrl-C                        ^

A **shielded** call may take long, or wait for others. It runs on a thread of the library, where no
handler ever runs, and the main thread waits. That is two switches of threads, some 20 us:

    main      shielded call --> waits . Ctrl-C: KeyboardInterrupt is raised at once
    library                     the call goes on to its end, and nothing is left half done

The exception leaves the wait and nothing else. What a caller does next, on another such thread,
finds the locks of the call that goes on, and waits for them: a second `commit()` answers what
became of the first. A result that nobody takes any more is dropped, and what it held is given
back as for any other object (below).

Inside of a brief call a shielded one runs right there, as both do on any other thread. Where a
brief call that writes would have to wait for others that do, it gives up, and is begun anew as a
shielded one (`shielded_unless`). What else of it may take long is **lengthy**: a shielded call of
its own. It is handed over in any case, so that it is done to its end; then handlers run again. An
exception comes out of the wait for it as any error does, and the caller holds nothing that the call
needs. Where the system gives no thread for it, it is done right there: others may wait for it.

What is as quick as that itself is not shielded: it keeps to memory, or holds what it holds in
`with` blocks over locks and transactions made in C, which the interpreter enters and leaves in one
step (`SharedGate`, `Tablet.look`).

Rejected: to put handlers off for as long as a call may take (Ctrl-C would do nothing while a store
is stuck), and to put others in the place of the program's handlers for a while (what installed one
in C, or asks which is installed, would be wrong).

Finalizers are the work to be done when an object is dropped, by a thread that holds no lock. The
garbage collector runs them wherever it happens to run, also in a thread that holds the very lock
that they want, and then nothing goes on any more:

    a thread takes the lock of the ids, allocates -> the collector drops a transaction
    -> its finalizer waits for the lock of the ids

So a finalizer puts its work into a queue, which is safe anywhere, and a thread does it. The
finalizer is the queue's own `put`, which is C: one in Python could be broken off by a signal. A
generator that was broken off is ended so, too: at its end it waits for no thread and no lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar, cast

from txnkv.core import Handlers
from txnkv.errors import StorageFullError, TxnkvError
from txnkv.storage.faults import no_thread
from txnkv.storage.locks import new_baton, new_event, new_lock
from txnkv.storage.write_queue import AGAIN, hastily

P = ParamSpec("P")
T = TypeVar("T")

_here: Final = threading.get_ident
_END: Final = object()
_LOOK_EVERY: Final = 0.2
"""Seconds."""
_STEP: Final = 0.01
_HELD: Final = 0.05
"""Seconds for which tasks wait for a thread that is busy, before another does them."""


class Abandoned(Exception):
    """Nobody waits for this call any more."""


class _Running(threading.local):
    call: _Call | None = None


class _Call:
    """One call, and what became of it."""

    __slots__ = ("abandoned", "args", "done", "error", "fn", "kwargs", "result")

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.done = new_baton()

    def run(self) -> None:
        try:
            self.result = self.fn(*self.args, **self.kwargs)
        except BaseException as error:
            # Without this frame, which has the call, and so would keep all that it had until the
            # collector comes, in whatever thread.
            trace = error.__traceback__
            self.error = error.with_traceback(None if trace is None else trace.tb_next)
            del trace


class _Threads:
    """The threads that shielded calls run on: one, and another for each call that goes on
    although the main thread does not wait for it any more.
    """

    def __init__(self) -> None:
        self.main: int | None = threading.main_thread().ident
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._started = 0
        self._calls_open: list[None] = []  # one for each that has not ended

    def run(self, call: _Call) -> Any:
        try:
            self.take(call)
        except RuntimeError as error:
            raise no_thread(error) from error
        except BaseException:
            call.abandoned = True
            raise
        return self.outcome(call)

    def take(self, call: _Call) -> None:
        if self._started <= len(self._calls_open):
            start = threading.Thread(target=self._serve, name="txnkv-shielded", daemon=True).start
            if _handlers is None:
                start()
            else:  # it waits for the thread in Python, and an interruption of that is another error
                _handlers.put_off(start, (), {})
            self._started += 1
        self._calls_open.append(None)  # first: broken off here, there is a thread too many
        self._calls.put(call)

    def outcome(self, call: _Call) -> Any:
        try:
            while not call.done.acquire(timeout=_LOOK_EVERY):
                pass  # a signal that another thread took woke nobody: its handler runs here
        except BaseException:
            call.abandoned = True
            raise
        error, call.error = call.error, None  # frames of the traceback have the call
        if error is not None:
            try:
                raise error
            finally:
                del error
        return call.result

    def ended(self, seconds: float) -> bool:
        """Wait until no call goes on whose caller was interrupted; False when one still does."""
        until = time.monotonic() + seconds
        while self._calls_open and time.monotonic() < until:
            time.sleep(_STEP)
        return not self._calls_open

    def _serve(self) -> None:
        while True:
            call = self._next()
            self._calls_open.pop()
            call.done.release()
            del call

    def _next(self) -> _Call:
        call = self._calls.get()
        _running.call = call
        call.run()
        _running.call = None
        return call


_threads = _Threads()
_running: Final = _Running()
calls_ended: Final = _threads.ended


def caller() -> int | None:
    """The thread in which the program called: of a shielded call that is the main one."""
    return _here() if _running.call is None else _threads.main


def go_on() -> None:
    """End a long call of which the caller was interrupted. Between two steps of it.

    Raises:
        Abandoned: nobody hears of it: the work is undone as after any other error.
    """
    call = _running.call
    if call is not None and call.abandoned:
        raise Abandoned("the caller was interrupted and does not wait for this any more")


def _known_handlers() -> Handlers | None:
    try:
        return Handlers(threading.main_thread().ident or 0)
    except RuntimeError:
        return None


def _is_main() -> bool:
    return _here() == _threads.main


def _run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_exposed():
        return fn(*args, **kwargs)
    return _threads.run(_Call(fn, args, kwargs))


_handlers: Final = _known_handlers()
is_exposed: Final = _is_main if _handlers is None else _handlers.here
_put_off: Final = _run if _handlers is None else _handlers.put_off
_let: Final = _run if _handlers is None else _handlers.let
is_calm: Final[Callable[[], bool]] = bool if _handlers is None else _handlers.calm
"""Tells whether a brief call of this thread lasts, in which no handler runs."""


def done_here(fn: Callable[..., T], *args: Any) -> Future[T]:
    """A future of a call that is made now, for want of a thread."""
    future: Future[T] = Future()
    try:
        future.set_result(fn(*args))
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    return future


def submitted(pool: Executor, fn: Callable[..., T], *args: Any) -> Future[T]:
    """The future of a call of a pool's thread, or where none is to be had of one made now."""
    try:
        return pool.submit(fn, *args)
    except RuntimeError:
        return done_here(fn, *args)


class TaskThread:
    """A thread that does tasks in their order, callbacks of the program among them: where one
    holds it while others wait, another thread takes its place.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = new_lock()
        self._pool: ThreadPoolExecutor | None = None
        self._place = 0  # how often it was taken
        self._ident: int | None = None
        self._busy = self._watched = False
        self._held: dict[int, ThreadPoolExecutor] = {}  # by thread, whose place was taken
        self._tasks: deque[tuple[float, Callable[[], object]]] = deque()  # with when they came

    def hand(self, task: Callable[[], object]) -> bool:
        """Have a task done; False where no thread is to be had: it is not."""
        self._tasks.append(waiting := (time.monotonic(), task))
        if not self._wake():
            with suppress(ValueError):  # another has taken it
                self._tasks.remove(waiting)
                return False
        if self._busy:
            self._watch()
        return True

    def leave(self) -> None:
        """Have another thread do what waits, where this is the one: it is going to wait."""
        if _here() == self._ident:
            self._replace()

    def close(self) -> None:
        """Wait until what it was given is done, but by this thread."""
        self.leave()
        begun = new_event()
        if self._pool is not None and self.hand(begun.set):
            begun.wait()  # another thread may have taken the place by then
        for ident, pool in {0: self._pool, **self._held}.items():
            if pool is not None and ident != _here():
                pool.shutdown()

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            timer = threading.Timer(_HELD, self._look)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # the machine gives none
                self._watched = False

    def _look(self) -> None:
        self._watched = False
        try:
            since = self._tasks[0][0]
        except IndexError:
            return
        if self._busy and since < time.monotonic() - _HELD:
            self._replace()
        else:
            self._watch()

    def _replace(self) -> None:
        with self._mutex:
            former, self._pool = self._pool, None
            ident, self._ident = self._ident, None
            if former is not None and ident is not None:
                self._held[ident] = former
            self._place += 1
            self._busy = False
        if former is not None:
            former.shutdown(wait=False)
        for _ in range(len(self._tasks)):
            if not self._wake():
                self._do(self._place)

    def _wake(self) -> bool:
        with self._mutex:
            pool, place = self._pool, self._place
            if pool is None:
                pool = self._pool = ThreadPoolExecutor(
                    1, thread_name_prefix=self._name, initializer=partial(self._begin, place)
                )
        try:
            pool.submit(self._do, place)
        except RuntimeError:
            if self._pool is pool:
                self._pool = None  # what it has in its own queue, it never does
            return False
        return True

    def _begin(self, place: int) -> None:
        with self._mutex:
            if place == self._place:
                self._ident = _here()

    def _do(self, place: int) -> None:
        with self._mutex:
            if place != self._place or not self._tasks:
                return  # the thread that took the place does it, or has
            task = self._tasks.popleft()[1]
            self._busy = True
        if self._tasks:
            self._watch()
        try:
            task()
        finally:
            if place == self._place:
                self._busy = False
            else:
                self._held.pop(_here(), None)


def shielded(fn: Callable[P, T]) -> Callable[P, T]:
    """Have no signal handler interrupt `fn`, in whatever thread it is called, nor wait for it."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_exposed():
            return fn(*args, **kwargs)
        return _threads.run(_Call(fn, args, kwargs))  # type: ignore[no-any-return]

    return call


def brief(fn: Callable[P, T]) -> Callable[P, T]:
    """Have no signal handler interrupt `fn`, which ends soon: they run at its end."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _put_off(fn, args, kwargs)  # type: ignore[no-any-return]

    return call


def shielded_unless(
    is_brief: Callable[..., bool],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`brief` where a look at the arguments shows that it ends soon, else `shielded`; so too where
    it is kept from its turn to write: a BusyError says that it has done nothing, and it is begun
    anew.
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not is_exposed():
                return fn(*args, **kwargs)
            found: Any = AGAIN
            if _put_off(is_brief, args, kwargs):
                found = _put_off(hastily, (fn, args, kwargs), {})
            if found is AGAIN:
                found = _run(fn, args, kwargs)
            return cast(T, found)

        return call

    return decorate


def lengthy(fn: Callable[P, T]) -> Callable[P, T]:
    """`shielded`, inside of a brief call too: the caller holds nothing that `fn` needs."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_calm():
            return _run(fn, args, kwargs)  # type: ignore[no-any-return]
        handed = _Call(fn, args, kwargs)
        try:
            _threads.take(handed)
        except RuntimeError:  # no thread is to be had: what has begun is done here
            return fn(*args, **kwargs)
        try:
            return _let(_threads.outcome, (handed,), {})  # type: ignore[no-any-return]
        except BaseException:
            handed.abandoned = True
            raise
        finally:
            del handed

    return call


def shielded_steps(items: Iterator[T]) -> Iterator[T]:
    """The same, each step of it shielded: for generators that read the store."""
    step = shielded(partial(next, items, _END))
    while (item := step()) is not _END:
        yield item


def _at_exit() -> None:
    """Have what finalizers call behind this be done where they call it: the threads of the library
    go no further, for the interpreter has ended for all but one.
    """
    _threads.main = None
    if _handlers is not None:
        _handlers.end()
    _worker.thread = threading.main_thread()  # which settles nothing any more


# First, so that it runs last.
atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    global _threads
    _threads = _Threads()
    if _handlers is not None:
        _handlers.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


_log = logging.getLogger("txnkv")

_PATIENCE: Final = 1.0
"""Seconds; the work may want a lock that waits for the one who waits for it."""
_PAUSE: Final = 0.5
"""Seconds until what failed is tried again."""

_Work = tuple[Callable[..., object], tuple[Any, ...]]


class _Watch(weakref.ref[Any]):
    """Says that its object was dropped, and what is to be done."""

    __slots__ = ("work",)
    work: _Work


class _Worker:
    """The queue of this process and its thread, which the first user starts."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work | _Watch] = SimpleQueue()
        self.watched: dict[int, _Watch] = {}
        self._lock = new_lock()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self.thread is None:
                thread = threading.Thread(target=self._run, name="txnkv-dropped", daemon=True)
                with suppress(RuntimeError):  # no thread is to be had: the next one tries again
                    thread.start()
                    self.thread = thread

    def settle(self) -> None:
        if self.thread in (None, threading.current_thread()):
            return
        done = new_event()
        self.queue.put((done.set, ()))
        done.wait(_PATIENCE)

    def _run(self) -> None:
        while True:
            found = self.queue.get()
            if isinstance(found, _Watch):
                if (watch := self.watched.pop(id(found), None)) is None:
                    continue  # it was called
                found = watch.work
                del watch
            try:
                found[0](*found[1])
            except Exception as error:
                if isinstance(error, StorageFullError) or getattr(error, "retriable", False):
                    self._try_again(found)
                else:
                    frames = None if isinstance(error, TxnkvError) else error
                    with suppress(Exception):  # a handler that fails is not to end this thread
                        _log.error("tidying up after a dropped object: %s", error, exc_info=frames)
            del found

    def _try_again(self, work: _Work) -> None:
        timer = threading.Timer(_PAUSE, self.queue.put, (work,))
        timer.daemon = True
        with suppress(RuntimeError):  # no thread is to be had
            timer.start()
            return
        time.sleep(_PAUSE)
        self.queue.put(work)


_worker = _Worker()


class WhenDropped:
    """Calls `fn(*args)` once: on another thread when `owner` is dropped, or here when called.

    Nothing happens in a forked child, whose inherited objects are the parent's, nor at exit.
    """

    def __init__(self, owner: object, fn: Callable[..., object], *args: Any) -> None:
        if _worker.thread is None:
            _worker.start()
        self._watch: _Watch | None = _Watch(owner, _worker.queue.put)
        self._watch.work = (fn, args)
        _worker.watched[id(self._watch)] = self._watch

    @property
    def alive(self) -> bool:
        """Not called yet, nor dropped."""
        watch = self._watch
        return watch is not None and watch() is not None

    def __call__(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and _worker.watched.pop(id(watch), None) is not None:
            fn, args = watch.work
            fn(*args)

    def forget(self) -> None:
        """Nothing is to be done any more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            _worker.watched.pop(id(watch), None)


def later(fn: Callable[..., object], *args: Any) -> None:
    """Call on the library's thread, again while the disk is full or the error is retriable."""
    if _worker.thread is None:
        _worker.start()
    _worker.queue.put((fn, args))


def settle_dropped() -> None:
    """Wait a little until what was dropped before is tidied up, and has given up its pins.

    For who looks at pins next. Not to be called with a lock or inside a read of status.db.
    """
    _worker.settle()


def _new_worker_in_child() -> None:
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_new_worker_in_child)
