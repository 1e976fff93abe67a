"""The way of one client to its server, over Arrow Flight.

    request    {guest, number, first: [calls], calls: [calls], drop: [handles]}
    answer     a value for each call, in their order, up to the first error

**A guest** is one client in one process, as the server sees it: its handles live there under
numbers that the client gives, and for as long as the client is heard of, by its requests or by the
heartbeat that a thread here sends. A forked child has no part in it.

**Numbers** make each request one. When its answer does not come the same request is sent again,
under its number, and the server gives the answer that it has, or says that it still works on it. So
a cut connection costs nothing. Only where the server itself is another one since, nobody knows what
became of a request that writes: CommitOutcomeUnknownError. What cannot have arrived, and what only
reads, is UnavailableError, which is retriable.

**Calls that need no answer** wait for the next request, and go in front of its own: to begin a
transaction, to make a session. So the transaction of a few rows is one request.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl

from txnkv.errors import (
    AuthenticationError,
    ClosedError,
    CommitOutcomeUnknownError,
    NotSupportedError,
    TxnkvError,
    UnavailableError,
)
from txnkv.remote import wire
from txnkv.remote.wire import LostHandleError, pack, tells_of_change, unpack
from txnkv.storage import GATE, SharedWeakSet, new_event, new_lock

_log = logging.getLogger("txnkv")

_LEAST_PATIENCE: Final = 2.0
_RECONNECT: Final = [  # a server that is there again is found soon: gRPC waits for two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
]
_PAUSE: Final = 0.4  # longer than gRPC waits with that; until then it lets every call fail
_CONNECTING_SECONDS: Final = 5.0  # to a busy server; half of the call's patience if that is less

_TRIES: Final = 3
_HEART: Final = "txnkv-heartbeats"
_NOT_SENT: Final = re.compile(
    r"(?i)failed to connect|connection refused|name resolution|DNS|no such file|handshake"
)
_HINTS: Final = {  # by a part of gRPC's words: why a server is not trusted, and what to do
    "certificate verify failed": "credentials have `ca`, the authority of the server's certificate",
    "is not in peer certificate": "take an address with a name that the server's certificate has",
}


@dataclass(slots=True, eq=False)
class Call:
    """One call of a request.

    Attributes:
        twin: the class of the handle at the server.
        target: what names the handle.
        makes: the number that the handle gets which it gives; 0: none.
        done: is given the value.
    """

    twin: str
    target: Any
    name: str
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] | None = None
    makes: int = 0
    done: Callable[[Any], None] | None = None

    @property
    def again(self) -> bool:
        """It may be made twice."""
        return wire.METHODS[self.twin][self.name].again

    @property
    def writes(self) -> bool:
        """It is not for who only reads. What an administrator is told may be asked twice."""
        right = wire.METHODS[self.twin][self.name].right
        return right == "write" or (right == "admin" and not self.again)

    def content(self) -> list[Any]:
        """Return the call as it is sent: flat, since each list in it is looked into."""
        kind, what = target = self.target.reference()
        named = dict(self.named) if self.named else None
        return [what if kind == "h" else target, self.name, self.makes, named, *self.args]


class Channel:
    """The connection of one client. Shared by threads.

    Args:
        address: as "grpc://host:port".
        headers: of each call: the credentials.
        tls: options of the Flight client.
        keepalive_time: seconds without a sign of life after which the server gives up this
            client's handles.
        refer: names handles in what is sent.
        read_only: refuse to send what writes.

    Attributes:
        shared: what outlives the server's process: transactions that others know of, snapshots.
    """

    def __init__(
        self,
        address: str,
        headers: list[tuple[bytes, bytes]],
        tls: dict[str, Any],
        keepalive_time: float,
        refer: Callable[[str, str, Any], list[Any] | None],
        read_only: bool,
    ) -> None:
        self.address = address
        self.keepalive_time = keepalive_time
        self.patience = max(_LEAST_PATIENCE, min(keepalive_time, 30.0))
        self._options = fl.FlightCallOptions(timeout=self.patience, headers=headers)
        self._unbounded = fl.FlightCallOptions(headers=headers)
        self.guest = uuid.uuid4().hex
        self._refer = partial(refer, self.guest, address)
        self._tls, self._read_only = tls, read_only
        self._lock = new_lock()
        self._pid, self._stop = os.getpid(), new_event()
        self.server = ""  # which one has answered
        self._flight: fl.FlightClient | None = None
        self._numbers, self._last_handle = count(1), 0
        self._waiting: list[Call] = []
        self._answered: deque[int] = deque()
        self._dropped: deque[int] = deque()
        self.spare_ids: deque[int] = deque()  # that the server gave, to begin by
        self._streams = SharedWeakSet[Any]()
        self.changes = 0  # of tables, that errors told of
        self.shared = SharedWeakSet[Any]()
        self._thread: threading.Thread | None = None
        self.closing = self.closed = False  # here

    # -- calls -------------------------------------------------------------------------

    def new_handle(self) -> int:
        """Return the number of a handle that a call is to make."""
        self.require_open()
        with self._lock:
            self._last_handle += 1
            return self._last_handle

    def later(self, call: Call) -> None:
        """Have a call go in front of the next request, whatever that is."""
        self.require_open()
        with self._lock:
            self._waiting.append(call)

    def forget(self, call: Call) -> bool:
        """Take back a call that still waits; whether it did."""
        with suppress(ValueError), self._lock:
            self._waiting.remove(call)
            return True
        return False

    def drop(self, handle: int) -> None:
        """Have the server give up a handle, with the next request or heartbeat."""
        self._dropped.append(handle)

    def kept(self, handle: int) -> object:
        """Return what keeps a handle at the server: that gives it up when this is dropped."""
        return _Kept(self._dropped, handle)

    def call(self, *calls: Call) -> Any:
        """Make calls, one after the other, and return the value of the last one.

        Raises:
            UnavailableError: the server cannot be reached, or is another one since and has not
                this handle. Nothing of it was done, or it only reads.
            CommitOutcomeUnknownError: nobody knows whether it was done.
            AuthenticationError: the server refused the credentials, or what this user asks for.
            TxnkvError, ValueError, TypeError: as the call itself raises.
        """
        self.require_open()
        for call in calls if self._read_only else ():
            self.require_writable(call)
        with self._in_front() as first:
            return self._call(first, calls)

    @contextmanager
    def _in_front(self) -> Iterator[list[Call]]:
        """Take the calls that wait; where the block fails they may wait again."""
        with self._lock:
            first, self._waiting = self._waiting, []
        try:
            yield first
        except UnavailableError as error:
            if not isinstance(error, LostHandleError):
                self._wait_again(first)  # it did not arrive, or may be made again
            raise

    def _wait_again(self, first: list[Call]) -> None:
        with self._lock:
            self._waiting[:0] = first
        first.clear()

    def _is_sendable(self, call: Call) -> bool:
        with suppress(Exception):
            return bool(pack(call.content(), self._refer))
        return False

    def _send_waiting(self) -> None:
        with self._in_front() as first:
            if first:
                self._call(first, ())

    def _call(self, first: list[Call], calls: tuple[Call, ...]) -> Any:
        body = self._head() | {"number": next(self._numbers)}
        body["once"] = not all(call.again for call in calls)
        body["answered"] = answered = self._some(self._answered)
        body["drop"] = dropped = self._some(self._dropped)
        request = b""
        try:
            body["first"] = [call.content() for call in first]
            body["calls"] = [call.content() for call in calls]
            request = pack(body, self._refer)
            return self._ask(request, body, first, calls)
        except BaseException:  # perhaps it did not arrive, and to be told twice is fine
            self._answered.extend(answered)
            self._dropped.extend(dropped)
            if not request:  # for a value that is not sent: what others wait for is none of it
                first[:] = filter(self._is_sendable, first)
                self._wait_again(first)
            raise

    def _ask(
        self, request: bytes, body: dict[str, Any], first: list[Call], calls: tuple[Call, ...]
    ) -> Any:
        number, every = body["number"], (*first, *calls)
        tries = given = 0
        waits = self.server != ""  # it was there, and may be again
        while True:
            try:
                answers = self._answers(request)
                for values, error, state in answers:
                    if self._asks_again(state, body, first):
                        break
                    for value in values[max(given - state["at"], 0) :]:
                        done = every[given].done
                        given += 1
                        if done is not None:
                            done(value)
                    if error is not None:
                        del first[:given]  # they were made, or the request was refused
                        if not isinstance(error, CommitOutcomeUnknownError):
                            self._wait_again(first)
                        self._answered.append(number)
                        self.changes += tells_of_change(error)
                        raise error
                    if given == len(every):
                        self._answered.append(number)
                        with suppress(_Broken, TxnkvError):
                            deque(answers, 0)  # gRPC cancels what is not read to its end
                        return values[-1] if values else None
                else:
                    raise _Broken("the answer broke off", arrived=True)
            except _Broken as broken:
                if waits and tries == 0 and not self.closing and "refused" in str(broken):
                    waits = False
                    time.sleep(_PAUSE)
                    continue
                tries += 1
                self._after(broken, tries, again=not body["once"])
            # From now on it is the same request, asked for again.
            request = pack(body | {"asked": True}, self._refer)

    def _asks_again(self, state: dict[str, Any], body: dict[str, Any], first: list[Call]) -> bool:
        """Tell whether nothing is done yet; ids of an earlier server give way to new ones."""
        if state["server"] != self.server:
            self.spare_ids.clear()  # another one gave them
            self.server = state["server"]
        ids = dict(state.get("ids", ()))
        for call in first:
            if call.makes in ids and call.done is not None:
                call.args = (*call.args[:-1], ids[call.makes])
                call.done(ids[call.makes])
        if ids:
            body |= {"server": state["server"], "first": [call.content() for call in first]}
        return bool(ids or state.get("working"))

    def spare_id(self) -> int:
        """Return an id for a transaction that is to begin; 0: there is none."""
        try:
            return self.spare_ids.popleft()
        except IndexError:
            return 0

    def _after(self, broken: _Broken, tries: int, again: bool) -> None:
        """Wait before the same request is sent again, or give up."""
        words = f"the server at {self.address} does not answer: {broken}"
        if not broken.arrived and tries == 1:
            raise self._unreachable(broken, f"{words}. Nothing was done; try again") from None
        tries = _TRIES if self.closing else tries  # nobody waits for more
        if again and (broken.late or tries >= 2):
            raise UnavailableError(f"{words}. Nothing was changed; try again") from None
        if tries >= _TRIES:
            raise CommitOutcomeUnknownError(
                f"{words}. Nobody knows whether the call was done: look, before it is made again", 0
            ) from None
        time.sleep(0.05 * tries)

    def _unreachable(self, broken: _Broken, words: str) -> TxnkvError:
        """The error of a server that cannot be reached, or is not trusted."""
        text = str(broken)
        for part, hint in _HINTS.items():
            if part in text:
                return AuthenticationError(f"{self.address} is not trusted: {text}: {hint}")
        if "Socket closed" in text:
            asks = "want a certificate, or another than the one in credentials"
            words += f". Does the server {asks if '+tls' in self.address else 'want grpc+tls://'}?"
        return UnavailableError(words)

    def _answers(self, request: bytes) -> Iterator[tuple[list[Any], Any, dict[str, Any]]]:
        try:
            for part in self._client().do_action(fl.Action(wire.ACTION, request), self._options):
                answer = unpack(part.body.to_pybytes())
                yield answer["values"], answer.get("error"), answer
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            raise self._understood(error) from None

    def _understood(self, error: Exception) -> Exception:
        """An error of Flight as one of ours, or as a broken connection."""
        text = _first_line(error)
        if told := getattr(error, "extra_info", b""):
            found = unpack(bytes(told))
            if isinstance(found, Exception):
                return found
        if isinstance(error, fl.FlightUnauthenticatedError | fl.FlightUnauthorizedError):
            return AuthenticationError(f"{self.address}: {text}")
        if isinstance(error, fl.FlightUnavailableError):
            return _Broken(text, arrived=_NOT_SENT.search(text) is None)
        if isinstance(error, NotImplementedError):
            return NotSupportedError(f"{self.address} is no server of txnkv: {text}")
        if isinstance(error, fl.FlightServerError):
            return TxnkvError(f"the server at {self.address} failed: {text}")
        return _Broken(text, arrived=True, late=isinstance(error, fl.FlightTimedOutError))

    def require_writable(self, call: Call | None = None) -> None:
        """Refuse a call that writes, or any, where this client was opened to read only.

        Raises:
            NotSupportedError: it was.
        """
        if self._read_only and (call is None or call.writes):
            raise NotSupportedError(
                f"{self.address} was opened with read_only=True: connect without it to write"
            )

    # -- streams -----------------------------------------------------------------------

    def stream(self, call: Call) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Make a call that is answered by batches, which come as they are asked for; raises as
        `call`, here and while they are read.
        """
        self.require_open()
        self._send_waiting()
        ticket = fl.Ticket(pack(self._head() | {"calls": [call.content()]}, self._refer))
        try:
            reader = self._client().do_get(ticket, self._unbounded)
            schema = reader.schema
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            raise self._read_failed(error) from None
        self._streams.add(reader)
        return schema, self._batches(reader)

    def _batches(self, reader: Any) -> Iterator[pa.RecordBatch]:
        while True:
            try:
                batch = reader.read_chunk().data
            except StopIteration:
                return
            except (fl.FlightError, pa.ArrowException, OSError) as error:
                raise self._read_failed(error) from None
            yield batch

    def _read_failed(self, error: Exception) -> Exception:
        found = self._understood(error)
        if isinstance(found, _Broken):
            words = f"the server at {self.address} does not answer: {found}. Read again"
            return self._unreachable(found, words)
        return found

    def put(self, call: Call, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Any:
        """Make a call whose last argument is a stream of batches, and return its value; raises as
        `call`. A stream that breaks off counts for nothing.
        """
        self.require_open()
        self.require_writable(call)
        self._send_waiting()
        number = next(self._numbers)
        head = self._head() | {"number": number, "once": True, "calls": [call.content()]}
        descriptor = fl.FlightDescriptor.for_command(pack(head, self._refer))
        try:
            return self._put(descriptor, schema, batches)
        except _Broken as broken:
            if not broken.arrived:
                self._after(broken, 1, again=False)
        # It has an answer, or never had the end of the stream and was not done.
        return self.call(Call(call.twin, call.target, "put", (number,)))

    def _put(self, descriptor: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Any:
        try:
            writer, answers = self._client().do_put(descriptor, schema, self._unbounded)
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            raise self._understood(error) from None
        try:
            for batch in batches:
                if batch.schema != schema:  # its answer would be waited for, and there is none
                    raise ValueError(f"a batch has the columns {batch.schema}, not {schema}")
                _flight(writer.write_batch, batch)
            _flight(writer.write_with_metadata, wire.empty_batch(schema), wire.END_OF_PUT)
            _flight(writer.done_writing)
            answer = _flight(answers.read)
        except _FlightFailed as failed:
            answer = _last_words(answers)
            if answer is None:
                raise self._understood(_closed(writer) or failed.args[0]) from None
        except BaseException:
            _closed(writer)
            raise
        else:
            _closed(writer)
        if answer is None:
            raise _Broken("the answer broke off", arrived=True)
        found = unpack(answer.to_pybytes())
        if found["error"] is not None:
            raise found["error"]
        return found["values"][-1]

    def _head(self) -> dict[str, Any]:
        return {
            "version": wire.VERSION,
            "guest": self.guest,
            "keepalive": self.keepalive_time,
            "server": self.server,
            "handles": self._last_handle,
        }

    # -- the connection ----------------------------------------------------------------

    def _client(self) -> fl.FlightClient:
        with self._lock:
            if self._flight is None:
                seconds = min(_CONNECTING_SECONDS, self.patience / 2)
                connecting = ("grpc.min_reconnect_backoff_ms", round(1000 * seconds))
                GATE.add_threaded(self)
                try:
                    self._flight = fl.FlightClient(
                        self.address, generic_options=[*_RECONNECT, connecting], **self._tls
                    )
                except (pa.ArrowException, OSError) as error:
                    raise ValueError(f"{self.address}: {_first_line(error)}") from None
            if self._thread is None:
                self._stop = new_event()
                args = weakref.ref(self), self._stop, self.keepalive_time / 4
                thread = threading.Thread(None, _heartbeats, _HEART, args, daemon=True)
                thread.start()
                self._thread = thread  # not before: where none is to be had the next call tries
            return self._flight

    def require_open(self) -> None:
        """Refuse a closed client, and one that a forked child inherits."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the client of {self.address} belongs to process {self._pid}, and its connections "
                "do not survive a fork: connect in a process that was spawned, or forked before "
                "the first connect"
            )
        if self.closed:
            raise ClosedError(f"the client of {self.address} was closed; connect again")

    def beat(self) -> None:
        """Tell the server that this client lives."""
        self.require_open()
        body = self._head() | {"drop": (dropped := self._some(self._dropped))}
        try:
            deque(self._client().do_action(fl.Action(wire.PING, pack(body)), self._options), 0)
        except Exception as error:
            self._dropped.extend(dropped)  # for the next one
            _log.info("no heartbeat to %s: %s", self.address, _first_line(error))
            for reader in self._streams:
                reader.cancel()  # who reads it is told, and does not wait for ever
        for each in self.shared:  # what a server lost is joined, or made, again in time
            with suppress(TxnkvError):
                each.revive()

    def close(self) -> None:
        """Give up all handles at the server. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        self._stop.set()
        if os.getpid() != self._pid or self._flight is None:
            return
        body = pack({"version": wire.VERSION, "guest": self.guest})
        try:
            if self.server:  # or it knows of nobody
                deque(self._flight.do_action(fl.Action(wire.BYE, body), self._options), 0)
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            _log.info("%s was not told of the end: %s", self.address, _first_line(error))
        self._flight.close()
        GATE.discard_threaded(self)

    @staticmethod
    def _some(waiting: deque[int]) -> list[int]:
        found = []
        while waiting:
            try:
                found.append(waiting.popleft())
            except IndexError:  # another thread has taken the last one
                break
        return found


class _Kept:
    __slots__ = ("_dropped", "_handle")

    def __init__(self, dropped: deque[int], handle: int) -> None:
        self._dropped, self._handle = dropped, handle

    def __del__(self) -> None:
        self._dropped.append(self._handle)


class _Broken(Exception):
    """The connection broke, or nothing came over it in time."""

    def __init__(self, text: str, *, arrived: bool, late: bool = False) -> None:
        super().__init__(text)
        self.arrived = arrived  # perhaps
        self.late = late  # it was waited for as long as patience has it


class _FlightFailed(Exception):
    """Flight failed, not the source of the batches."""


def _flight(do: Callable[..., Any], *args: Any) -> Any:
    try:
        return do(*args)
    except (fl.FlightError, pa.ArrowException, OSError) as error:
        raise _FlightFailed(error) from None


def _last_words(answers: Any) -> Any:
    """Return the answer to a stream of which the server wanted no more."""
    with suppress(fl.FlightError, pa.ArrowException, OSError):
        return answers.read()
    return None


def _closed(writer: Any) -> Exception | None:
    """Close a writer, and return the error that it ended with."""
    try:
        writer.close()
    except (fl.FlightError, pa.ArrowException, OSError) as error:
        return error
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].partition(". gRPC client debug context")[0][:500]


def _heartbeats(channel: weakref.ref[Channel], stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        if (found := channel()) is None:
            return
        try:
            found.beat()
        except ClosedError:
            return
        except Exception:  # whatever it is, the next one is sent
            _log.exception("a heartbeat to %s failed", found.address)
        del found
