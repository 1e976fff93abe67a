"""A store served to other hosts, over Arrow Flight.

    DoAction  txnkv.call   a request of calls; see `txnkv.remote`
              txnkv.ping   a heartbeat            txnkv.bye    a client's end
    DoGet     a ticket     a call that is answered by batches; or of anybody, JSON:
                           {"table": "orders", "columns": ["id"], "where": [["id", ">", 5]]}
    DoPut     a command    a call that takes batches; the last one says that it is the last
    ListFlights, GetFlightInfo    the tables, each with a ticket: any Flight client reads them
    GetSchema                     of a table

It opens the store as any process does; several may serve one. It holds nothing that has to outlive
it: what was committed is in the store, what was not is gone with it, as with any process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl

from txnkv.client import Client
from txnkv.client import connect as connect_here
from txnkv.core import require_valid_columns
from txnkv.errors import (
    AuthenticationError,
    NotSupportedError,
    TxnkvError,
    UnavailableError,
)
from txnkv.remote import ACTION, BYE, END_OF_PUT, PING, VERSION, pack, unpack
from txnkv.server.answering import abort_without, made, prepared, value_of
from txnkv.server.guests import Answer, Guest, Guests, Reference, lost, refused, together
from txnkv.server.users import EVERYBODY, About, Limits, User, Users
from txnkv.storage import (
    FULL_ERRNOS,
    GATE,
    NO_DESCRIPTOR_ERRNOS,
    lmdb_error,
    new_lock,
    no_thread,
)

_log = logging.getLogger("txnkv.server")

_WORKING_SECONDS: Final = 1.0
"""So long a request that was asked for again is waited for; then the client asks once more."""

_ERROR_BYTES: Final = 4096
"""An error of a stream goes in a header, which gRPC lets have 8 KiB."""

_WAITED: Final = ("sends", "rows")
"""Calls with what waited at a client: where some of it is refused, the rest is kept."""

_MIDDLEWARE: Final = "user"
_OURS: Final = pack({})[:1]
"""The first byte of a client's request; what begins with another was written by anybody."""
_TICKET: Final = ("table", "columns", "where", "limit")


def _open(path: str, addresses: tuple[str, ...], keepalive: float) -> Client:
    found = connect_here(path, create=False, keepalive_time=keepalive)
    found.addresses = addresses
    return found


def _ends(call: Callable[[], object], patience: float | None) -> bool:
    """Call, on a thread where it may take longer."""
    if patience is None:
        call()
        return True
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(patience)
    return not thread.is_alive()


class Server(fl.FlightServerBase):  # type: ignore[misc]
    """A server of one store.

    Args:
        path: the store's directory.
        location: where it listens, as "grpc://127.0.0.1:8815"; port 0 takes a free one.
        users: those who may; None: everybody may all.
        limits: of each user.
        addresses: where others reach it, for tokens; none: where the client reached it that asks.
        options: of `FlightServerBase`, for TLS.

    Raises:
        StoreNotFoundError: there is none.
        UnavailableError: it cannot listen there, or no thread can be had.
    """

    def __init__(
        self,
        path: str,
        location: str,
        users: Users | None = None,
        limits: Limits | None = None,
        addresses: Sequence[str] = (),
        **options: Any,
    ) -> None:
        GATE.add_threaded(self)
        self._pid, self._closed = os.getpid(), False
        self._limits = limits or Limits()
        self._client = connect_here(path, create=False)
        self._streams: dict[str, int] = {}
        self._lock = new_lock()
        self._users = users
        # They do not hold the server: one in a circle might be cleared away by a forked child,
        # which would wait for gRPC's threads for ever.
        try:
            self._guests = Guests(partial(_open, path, tuple(addresses)), self._limits)
        except RuntimeError as error:
            self._client.close()
            raise no_thread(error) from error
        try:
            knock = None if users is None else _Knock(users, options.get("verify_client", False))
            middleware = {} if knock is None else {_MIDDLEWARE: knock}
            super().__init__(location, middleware=middleware, **options)
        except (pa.ArrowException, OSError) as error:
            self._guests.close()
            self._client.close()
            raise UnavailableError(f"cannot listen at {location}: {error}") from None

    def require_store(self) -> None:
        """Look whether the store is still there.

        Raises:
            StoreNotFoundError: it was removed, moved or replaced: nothing is written any more.
        """
        self._client.instance.store.require_there()

    def close(self, patience: float | None = None) -> bool:
        """Stop: calls that are under way end, clients lose their handles. Twice is fine.

        Args:
            patience: seconds for calls whose clients read or send no more; None: until they end.

        Returns:
            Whether all ended. What did not goes on: let the process end.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        self._closed = True
        ended = _ends(self.shutdown, patience)
        GATE.discard_threaded(self)
        ended = _ends(partial(self._guests.close, busy=ended), patience) and ended
        if ended:
            self._client.close()
        return ended

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- Flight ------------------------------------------------------------------------

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(ACTION, "calls"), (PING, "a heartbeat"), (BYE, "the end of a client")]

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        user = self._user(context)
        if action.type == ACTION:
            return self._request(user, action.body.to_pybytes())
        with _told_in_header():
            body = self._body(action.body.to_pybytes())
            if action.type == BYE:
                self._guests.end(body["guest"], user)
                return iter([pack(True)])
            if action.type == PING:
                if self._guests.has(body["guest"]):
                    guest = self._guests.of(body["guest"], body["keepalive"], user)
                    guest.drop(body["drop"])
                return iter([pack(True)])
            raise NotSupportedError(f"there is no action {action.type!r}")

    def do_get(self, context: Any, ticket: Any) -> Any:
        user = self._user(context)
        with _told_in_header():
            if ticket.ticket[:1] != _OURS:
                reader = self._of_anybody(user, ticket.ticket)
            else:
                body = self._body(ticket.ticket)
                guest = self._guest(user, body)
                (content,) = body["calls"]
                call = prepared(guest, content)
                if not call.method.stream:
                    raise ValueError(f"{call.name} is not answered by a stream")
                reader = value_of(guest, call)
            return fl.GeneratorStream(reader.schema, _told(self._counted(user, reader)))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        user = self._user(context)
        answer = Answer()
        with _told_in_header():
            body = self._body(descriptor.command or b"")
            guest = self._guest(user, body)
            call = prepared(guest, body["calls"][0])
            if call.name not in ("write", "send_batch") or len(call.args) < 2:
                raise ValueError(f"{call.name} takes no stream")
            answer, mine = guest.answer_of(int(body["number"]), asked=False, known=True)
            if not mine:
                raise ValueError("this stream was sent before")
        batches = self._counted(user, self._incoming(guest, reader))
        call.args[1] = pa.RecordBatchReader.from_batches(reader.schema, batches)
        try:
            guest.work(1)
            answer.values = [value_of(guest, call)]
        except Exception as error:
            answer.error = _known(error)
        guest.finish(answer)
        try:
            writer.write(pa.py_buffer(pack({"values": answer.values, "error": answer.error})))
        finally:
            batches.close()  # a thread may be reading what is gone when this returns

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        user = self._user(context)
        for name in self._client.tables():
            if user.may("read", About("table", name)):
                with suppress(TxnkvError):  # it may be dropped meanwhile
                    yield self._info(name)

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        with _told_in_header():
            return self._info(self._named(context, descriptor))

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        try:
            table = self._client.table(self._named(context, descriptor))
            return fl.SchemaResult(table.schema.arrow)
        except Exception as error:  # here pyarrow takes errors of its Flight for unknown ones
            raise ValueError(str(_known(error))[:1000]) from None

    def _named(self, context: Any, descriptor: Any) -> str:
        """The name of a table that the user may read."""
        user = self._user(context)
        if len(descriptor.path or []) != 1:
            raise ValueError("a flight is named by a path of one part, the name of a table")
        name: str = descriptor.path[0].decode()
        user.require("read", About("table", name))
        return name

    # -- requests ----------------------------------------------------------------------

    def _request(self, user: User, data: bytes) -> Iterator[bytes]:
        """The answer of a request: in two parts where the client does not know the id of the
        transaction that it commits, and may have to ask by it. Where it has ids of an earlier
        server for transactions that begin, and nobody can have begun them, it is given others.
        """
        guest = None
        try:
            body = self._body(data)
            guest = self._guest(user, body)
            body["drop"] = guest.drop(body["drop"], before=True)
            guest.forget(body["answered"])
            ids = [_id_of(each) for each in body["first"]]
            apart = 0 in ids
            asked, known = body["asked"], body["server"] == guest.birth
            if any(ids) and not known and not (body["once"] and asked):
                begins = [each[2] for each, id in zip(body["first"], ids, strict=True) if id]
                others = [[makes, guest.spare_id()] for makes in begins]
                return iter([_part(guest, [], lost(), ids=others)])
            answer, mine = Answer(), True
            if body["once"]:
                answer, mine = guest.answer_of(body["number"], asked=asked, known=known)
        except Exception as error:
            return iter([_part(guest, [], _known(error))])
        if not mine:
            if guest.wait(answer, _WORKING_SECONDS):
                return iter([_part(guest, answer.values, answer.error)])
            return iter([pack({"server": guest.birth, "values": [], "at": 0, "working": True})])
        parts = self._worked(guest, body, answer, apart)
        # One part is worked out here: gRPC enters Python anew for each step of a generator.
        return parts if apart else iter(list(parts))

    def _worked(
        self, guest: Guest, body: dict[str, Any], answer: Answer, apart: bool
    ) -> Iterator[bytes]:
        """Make the calls; `apart`: the values so far are told before a commit."""
        told = 0
        heard = True
        guest.work(1)
        try:
            for content in body["first"]:
                answer.values.append(self._first(guest, content))
            guest.drop(body["drop"])
            failed: list[TxnkvError] = []
            for content in body["calls"]:
                call = prepared(guest, content)
                if failed and call.name not in _WAITED:
                    raise together(failed)
                if apart and call.name in ("commit", "commits"):
                    try:
                        yield _part(guest, answer.values[told:], None, told)
                    except GeneratorExit:  # it asks again, and is given the whole answer
                        heard = False
                    told = len(answer.values)
                try:
                    answer.values.append(made(guest, call))
                except TxnkvError as error:
                    if call.name not in _WAITED:
                        raise
                    failed.append(refused(error))
                    answer.values.append(None)
            if failed:
                raise together(failed)
        except Exception as error:
            answer.error = _known(error)
            for last in body["calls"][-1:]:
                if isinstance(last, list) and last[1:2] == ["commit"]:
                    abort_without(guest, Reference("h", last[0]), error)
        finally:
            guest.finish(answer)
        if not heard:
            return
        try:
            yield _part(guest, answer.values[told:], answer.error, told)
        except (TypeError, ValueError) as error:
            yield _part(guest, [], _known(error))

    def _first(self, guest: Guest, content: Any) -> Any:
        """Make a call that nobody waits for; who uses its handle is told of an error."""
        try:
            return made(guest, prepared(guest, content))
        except Exception as error:
            makes = content[2] if isinstance(content, list) and len(content) > 2 else 0
            if type(makes) is int and makes:
                guest.add(makes, _known(error), None)
            return None

    def _body(self, data: bytes) -> dict[str, Any]:
        if len(data) > self._limits.message_bytes:
            raise ValueError(
                f"a message of {len(data):,} bytes: this server takes up to "
                f"{self._limits.message_bytes:,}. Write as a stream, or flush more often"
            )
        body = unpack(data, Reference)
        if not isinstance(body, dict):
            raise ValueError("a request is an object")
        if body.get("version") != VERSION:
            raise NotSupportedError(
                f"the client speaks version {body.get('version')!r}, this server {VERSION}: take "
                "the same version of txnkv on both"
            )
        return _Members(body)

    def _guest(self, user: User, body: dict[str, Any]) -> Guest:
        lost = body["handles"] if body["server"] else 0
        return self._guests.of(body["guest"], body["keepalive"], user, lost)

    def _user(self, context: Any) -> User:
        if self._users is None:
            return EVERYBODY
        found = context.get_middleware(_MIDDLEWARE)
        if found is None:
            raise fl.FlightUnauthenticatedError("no credentials")
        user: User = found.user_of(context)
        return user

    # -- streams -----------------------------------------------------------------------

    def _counted(
        self, user: User, batches: Iterable[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Batches, while the user has not too many streams; one counts from its first batch on."""
        with self._lock:
            have = self._streams.get(user.name, 0)
            if have >= self._limits.streams:
                raise UnavailableError(
                    f"user {user.name!r} has {have} streams, and may have no more: read some"
                )
            self._streams[user.name] = have + 1
        try:
            yield from batches
        finally:
            with self._lock:
                self._streams[user.name] -= 1

    def _incoming(self, guest: Guest, reader: Any) -> Iterator[pa.RecordBatch]:
        """Batches up to the one that says that it is the last; each is read while the one before it
        is written.
        """
        if len(reader.schema) > self._limits.columns:
            raise ValueError(
                f"{len(reader.schema):,} columns: {self._limits.columns:,} are the most"
            )
        with ThreadPoolExecutor(1, thread_name_prefix="txnkv-put") as pool:
            coming = pool.submit(self._next_of, reader)
            while True:
                with _idle(guest):  # a client that stops in the midst is given up as any other
                    batch = coming.result()
                if batch is None:
                    return
                coming = pool.submit(self._next_of, reader)
                yield batch

    def _next_of(self, reader: Any) -> pa.RecordBatch | None:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            raise UnavailableError(
                "the stream of rows broke off, and counts for nothing: write again"
            ) from None
        if chunk.app_metadata is not None and chunk.app_metadata.to_pybytes() == END_OF_PUT:
            return None
        if chunk.data is None or chunk.data.nbytes > self._limits.message_bytes:
            raise ValueError(
                f"a batch of more than {self._limits.message_bytes:,} bytes: send smaller ones"
            )
        chunk.data.validate()
        require_valid_columns(chunk.data)
        return chunk.data

    def _of_anybody(self, user: User, data: bytes) -> Any:
        asked = _asked(data)
        name, where = asked["table"], [tuple(each) for each in asked.get("where") or ()]
        user.require("read", About("table", name))
        scan = self._client.table(name).scan(
            asked.get("columns"), where or None, limit=asked.get("limit")
        )
        batches = scan.to_batches()
        return pa.RecordBatchReader.from_batches(scan.schema, batches)

    def _info(self, name: str) -> Any:
        table = self._client.table(name)
        ticket = fl.Ticket(json.dumps({"table": name}).encode())
        descriptor = fl.FlightDescriptor.for_path(name)
        endpoints = [fl.FlightEndpoint(ticket, [])]
        return fl.FlightInfo(table.schema.arrow, descriptor, endpoints, table.count(), -1)


def _asked(data: bytes) -> dict[str, Any]:
    """The members of a ticket that anybody has written.

    Raises:
        ValueError: it is none, or has others: without them it would ask for the whole table.
    """
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the ticket is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise ValueError('the ticket is no object, as {"table": "orders"}')
    for name in asked.keys() - set(_TICKET):
        raise ValueError(f"a ticket has no {name!r}; it has {', '.join(_TICKET)}")
    if not isinstance(asked.get("table"), str):
        raise ValueError("the ticket names no table: its `table` is a text, the table's name")
    columns, where = asked.get("columns"), asked.get("where")
    if columns is not None and not isinstance(columns, list):
        raise ValueError(f"columns is a list of names, as ['id'], not {columns!r}")
    if where is not None and (
        not isinstance(where, list) or not all(isinstance(each, list) for each in where)
    ):
        raise ValueError(f"where is a list of lists, as [['id', '>', 5]], not {where!r}")
    return asked


class _Members(dict[str, Any]):
    """The members of a request; one that is missing is a wrong request."""

    _DEFAULTS: Final = {
        "drop": [],
        "answered": [],
        "first": [],
        "calls": [],
        "once": False,
        "asked": False,
        "server": "",
        "handles": 0,
        "number": 0,
    }

    def __missing__(self, name: str) -> Any:
        if name in self._DEFAULTS:
            return self._DEFAULTS[name]
        raise ValueError(f"the request has no {name}")


def _id_of(content: Any) -> int | None:
    """The id that a call begins a transaction by; 0: by none; None: it begins none."""
    if not isinstance(content, list) or content[1:2] != ["begin"]:
        return None
    return content[-1] if type(content[-1]) is int else 0


def _part(
    guest: Guest | None, values: list[Any], error: BaseException | None, at: int = 0, **more: Any
) -> bytes:
    server = "" if guest is None else guest.birth
    return pack({"server": server, "values": values, "error": error, "at": at, **more})


@contextmanager
def _idle(guest: Guest) -> Iterator[None]:
    guest.work(-1)
    try:
        yield
    finally:
        guest.work(1)


def _known(error: Exception) -> Exception:
    """An error as a client is told of it; one that should not be stands in the log.

    It is kept until the client has it: without the frames, which have rows and streams.
    """
    if isinstance(error, OSError):  # of this machine, not of the client's
        _log.error("a call failed", exc_info=error)
        if error.errno in NO_DESCRIPTOR_ERRNOS | FULL_ERRNOS:
            file = f"the server's {error.filename or 'files'}"
            error = lmdb_error(error, Path(file)) or error
    if isinstance(error, TxnkvError | ValueError | TypeError | OSError | RuntimeError):
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error
    _log.error("a call failed", exc_info=error)
    return TxnkvError(f"the server failed: {type(error).__name__}: {error}")


@contextmanager
def _told_in_header() -> Iterator[None]:
    try:
        yield
    except fl.FlightError:
        raise
    except GeneratorExit:
        raise
    except Exception as error:
        raise _in_header(_known(error)) from None


def _told(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _told_in_header():
        yield from batches


def _in_header(error: Exception) -> fl.FlightError:
    told = pack(error)
    if len(told) > _ERROR_BYTES:
        told = pack(TxnkvError(f"{type(error).__name__}: {str(error)[:1000]}..."))
    kind = fl.FlightUnauthorizedError if isinstance(error, AuthenticationError) else None
    return (kind or fl.FlightServerError)(str(error)[:1000], told)


# -- who is there ----------------------------------------------------------------------


class _Knock(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in those whom it knows.

    Args:
        users: those who may.
        by_certificate: a client without a token is who its certificate says.
    """

    def __init__(self, users: Users, by_certificate: bool) -> None:
        self._users = users
        self._by_certificate = by_certificate

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> Any:
        given = [each for name, values in headers.items() if name.lower() == "authorization"
                 for each in values]  # fmt: skip
        if not given and self._by_certificate:
            return _Known(self._certified)
        kind, _, token = str(given[0] if given else "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise fl.FlightUnauthenticatedError(
                "this server wants a token: connect(..., credentials=...)"
            )
        with _knocking():
            user = self._users.of_token(token.strip())
        return _Known(lambda _: user)

    def _certified(self, context: Any) -> User:
        name = context.peer_identity().decode()
        with _knocking():
            return self._users.named(name)


@contextmanager
def _knocking() -> Iterator[None]:
    """Tell a client that it is not let in."""
    try:
        yield
    except AuthenticationError as error:
        raise fl.FlightUnauthenticatedError(str(error)) from None


class _Known(fl.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, user_of: Callable[[Any], User]) -> None:
        self.user_of = user_of
