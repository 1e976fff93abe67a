"""The calls of a request, made on the twins of the client's handles.

Most are a method of the twin. Those of `_OWN` are not, since a remote handle does in another way
what its local twin does: it sends rows that it has checked, waits in turns, takes many ids at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.client import (
    Attempts,
    Client,
    Consumer,
    DiffToken,
    Planning,
    Snapshot,
    Subscription,
    Table,
    Topic,
    begin_transaction,
    subscribe,
)
from txnkv.coordinator import TxnState
from txnkv.core import MESSAGES, decode_headers
from txnkv.errors import (
    InvalidTxnStateError,
    NotSupportedError,
    RowError,
    SchemaChangedError,
    SchemaError,
    TableNotFoundError,
    TopicNotFoundError,
    TxnkvError,
    UnavailableError,
)
from txnkv.remote import METHODS, Method
from txnkv.server.guests import Guest, Reference, add_each, require_reference, require_table
from txnkv.server.users import About
from txnkv.tables import DELETES, Outcome, lookup, places_of, require_operation, table_catalog
from txnkv.topics import Encoded, Message, Sender, messages_to_arrow
from txnkv.transaction import DEFAULTS, Job, Scan, ScanToken, Session, Transaction

_KINDS: Final[dict[str, type]] = {
    kind.__name__: kind
    for kind in (
        Attempts, Client, Consumer, Job, Planning, Scan, Sender, Session, Snapshot, Subscription,
        Table, Topic, Transaction,
    )
}  # fmt: skip

_NAMED: Final = (dict, type(None))
_MOST_SECONDS: Final = 10.0
"""A poll waits at most so long; its client asks again."""

_MOST_AT_ONCE: Final = 1 << 20
"""Bytes, about, of rows in one answer."""

_MOST_IDS: Final = 1000
_MOST_OFFSET: Final = 1 << 63
_LONGEST_ADDRESS: Final = 300
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Prepared(NamedTuple):
    """A call whose target is found, and that the user may make."""

    method: Method
    kind: str
    name: str
    target: Any
    about: About | None
    args: list[Any]
    named: dict[str, Any]
    makes: int


def prepared(guest: Guest, content: Any) -> Prepared:
    """Find what a call is made on, and whether it may be.

    Args:
        content: as the request has it.

    Raises:
        NotSupportedError: there is no such call.
        AuthenticationError: the user may not make it.
        LostHandleError: a handle is not there.
        ValueError: it makes no sense.
    """
    target_of, name, makes, named, *args = content
    if not isinstance(named, _NAMED) or type(makes) is not int or makes < 0:
        raise ValueError("a call makes no sense")
    if isinstance(target_of, list):
        target = guest.resolve(Reference(*target_of), "none")
    else:
        target = guest.find(target_of)
    kind = _kind_of(target.value)
    method = METHODS.get(kind, {}).get(name)
    if method is None:
        raise NotSupportedError(f"there is no call {name!r} of a {kind or 'handle'}")
    about = target.about
    referred = args and isinstance(args[0], Reference) and args[0].kind == method.names
    if method.names and not (method.given and referred):
        if not args or not isinstance(args[0], str):
            raise ValueError(f"{name} takes the name of a {method.names}")
        about = About(method.names, args[0])  # type: ignore[arg-type]
    if about is not None or method.right != "none":
        guest.user.require(method.right, about)
    if method.given and not method.names:
        require_reference(name, args, named)
    if not args and not named:
        return Prepared(method, kind, name, target.value, about, args, {}, makes)
    found = [_found(guest, each, method) if isinstance(each, Reference) else each for each in args]
    if found and isinstance(args[0], Reference) and args[0].kind in ("table", "topic"):
        about = About(args[0].kind, args[0].content[0])  # type: ignore[arg-type]
    by_name = {key: _found(guest, each, method) for key, each in (named or {}).items()}
    return Prepared(method, kind, name, target.value, about, found, by_name, makes)


def _kind_of(handle: object) -> str:
    """Return the name in the table of calls of a handle's class; "": it is none's."""
    kind: object = type(handle)
    return _name_of(kind)


@cache
def _name_of(kind: type) -> str:
    return next((name for name, known in _KINDS.items() if issubclass(kind, known)), "")


def _found(guest: Guest, value: Any, method: Method) -> Any:
    return guest.resolve(value, method.right).value if isinstance(value, Reference) else value


def made(guest: Guest, call: Prepared) -> Any:
    """Make a call, and return what is sent of its value."""
    if not call.makes:
        value = value_of(guest, call)
        return None if value is None else told(guest, value)
    if call.makes in guest.handles:  # it was made before
        return _begun_told(guest, guest.find(call.makes).value, call, 0)
    guest.require_room(begins=call.name in ("begin", "join"))
    value = value_of(guest, call)
    guest.add(call.makes, value, call.about)
    return _begun_told(guest, value, call, guest.spare_id() if call.name == "begin" else 0)


def _begun_told(guest: Guest, value: Any, call: Prepared, spare: int) -> Any:
    """The same as `told`; of a begin, an id for another one and the claim of its name too."""
    found = told(guest, value)
    if call.name != "begin":
        return found
    claim = getattr(value, "claim", None)  # of one that has a name
    return [*found, spare] if claim is None else [*found, spare, value.name, *claim]


def value_of(guest: Guest, call: Prepared) -> Any:
    """Make a call, and return its value."""
    own = _OWN.get((call.kind, call.name))
    if own is not None:
        return own(guest, call.target, *call.args, **call.named)
    found = getattr(call.target, call.name)
    return found(*call.args, **call.named) if callable(found) else found


def told(guest: Guest, value: Any) -> Any:
    """Return what a client is told of a value: of a handle what does not change."""
    tell = _TOLD.get(_kind_of(value))
    return value if tell is None else tell(guest, value)


_TOLD: Final[dict[str, Callable[[Guest, Any], Any]]] = {
    "Attempts": lambda _, __: None,
    "Consumer": lambda guest, it: {"at": _at(it)} | guest.ids,
    "Job": lambda _, it: {"id": it.id},
    "Planning": lambda _, it: {
        "store_id": it.store_id,
        "folder": it.folder,
        "boot": it.boot,
        "inode": it.inode,
    },
    "Scan": lambda _, it: {"schema": it.schema},
    "Sender": lambda _, it: {"sent": it.sent} | _about_sender(it),
    "Session": lambda _, __: None,
    "Snapshot": lambda _, it: {"timestamp": it.timestamp},
    "Subscription": lambda guest, it: {"info": it.info} | guest.ids,
    "Table": lambda _, it: {"name": it.name, "id": it.info.id, "schema": it.schema},
    "Topic": lambda _, it: {"info": it.info},
    "Transaction": lambda guest, it: _about(guest, it),
}


# -- calls of remote handles alone -----------------------------------------------------


def _begin(
    guest: Guest, client: Client, options: dict[str, Any] | None, id: int = 0
) -> Transaction:
    """By an id that the client was given, if it has one.

    Args:
        options: of the transaction; None: those that it has by default.
    """
    own: dict[str, Any] = {}
    if options is not None:
        unknown = options.keys() - DEFAULTS.keys() - {"claims"}
        if unknown:
            raise TypeError(f"a transaction has no option {', '.join(sorted(unknown))}")
        _require_namer(guest, options)
        own = {"claims": {}, **options}
    return _begun(guest, id, lambda spare: begin_transaction(client, own, spare=spare))


def _require_namer(guest: Guest, options: dict[str, Any]) -> None:
    """A name ends what is open under it, which is a change."""
    if options.get("name") is not None:
        guest.user.require("write")


def _attempts(guest: Guest, client: Client, options: dict[str, Any]) -> Attempts:
    _require_namer(guest, options)
    return client.attempts({"claims": {}, **options})


def _begun(guest: Guest, id: int, begin: Callable[[int | None], Transaction]) -> Transaction:
    if not id:
        return begin(None)
    local = guest.take_id(id)
    try:
        return begin(local)
    except BaseException:
        guest.client.instance.coordinator.ids.ended(local)
        raise


def _state(guest: Guest, client: Client, id: int) -> TxnState:
    """Tell of a transaction of this client also while nobody else knows of it."""
    guest.void_id(id)
    mine = guest.transaction(id)
    return client.transaction_state(id) if mine is None else mine.state


def _end_of(guest: Guest, client: Client, id: int) -> TxnState:
    """Tell how a transaction ended, or end it: its client waits no longer for the commit, and does
    the work again. What it sent before may be read later than this.
    """
    guest.void_id(id)
    mine = guest.transaction(id)
    if mine is not None:
        with suppress(InvalidTxnStateError):  # it is committed
            mine.rollback()
    state = client.transaction_state(id)
    if state is TxnState.OPEN:  # of an earlier server's
        raise UnavailableError(
            f"transaction {id} is open, and is aborted when nobody keeps it alive: ask again"
        )
    return state if state.ended else client.outcome(id)


def _rename_table(guest: Guest, client: Client, table: str | Table, name: Any) -> Table:
    """By who may do so with either name."""
    if not isinstance(name, str):
        raise ValueError(f"a table's name is a non-empty string, not {name!r}")
    guest.user.require("admin", About("table", name))
    return client.rename_table(table, name)


def _subscribe(guest: Guest, topic: Topic, *args: Any, **options: Any) -> Subscription:
    """By who may send to the topic that is named for dead letters, or make it."""
    name = options.get("dead_letter")
    if isinstance(name, str):
        there = name in guest.client.topics()
        guest.user.require("write" if there else "admin", About("topic", name))
    return topic.subscribe(*args, **options)


def _open_scan(guest: Guest, client: Client, parts: Any) -> Scan:
    require_table(guest, client, parts)
    return ScanToken(parts).open(client)


def _open_diff(guest: Guest, client: Client, parts: Any) -> pa.RecordBatchReader:
    require_table(guest, client, parts)
    return DiffToken(parts).open(client)


def _add_rows(
    guest: Guest, target: Session | Transaction, op: str, table: Any, columns: Any, rows: Any
) -> None:
    found = guest.resolve(table, "write").value
    add = getattr(target, require_operation(op))
    context = target.context if isinstance(target, Transaction) else target._context
    schema = found.schema if context is None else context.table_at_begin(found.info).schema
    at = [*columns.values()]
    gone = isinstance(target, Transaction) and not {*schema.ids.values()} >= {*at}
    places = cache(lambda *names: places_of(schema, {name: columns[name] for name in names}))
    every = None if gone else places(*columns)
    whole = every and [i for _, i in every] == [*range(len(schema.names))] == [*range(len(at))]
    for row in rows:
        try:
            if gone:
                raise table_catalog.changed(found.info)
            if op in DELETES:
                add(found, tuple(row) if row[1:] else row[0])
            elif whole and isinstance(row, list):
                add(found, tuple(row))
            else:
                named = _given(columns, row)
                add(found, _by_name(places(*named), [*named.values()]))
        except (SchemaError, SchemaChangedError) as error:  # its client knows the columns of before
            if isinstance(target, Transaction):
                raise table_catalog.changed(found.info) from None
            by_id = {columns[name]: value for name, value in _given(columns, row).items()}
            key = [by_id[schema.ids[name]] for name in schema.primary_key]
            refused = RowError(op, found.name, tuple(key) if key[1:] else key[0], error)
            target._errors.keep(Outcome(errors=[refused], refused=1))


def _given(columns: dict[str, int], row: Any) -> dict[str, Any]:
    """A row, or a key, by the names that it was given by."""
    return row if isinstance(row, dict) else dict(zip(columns, row, strict=True))


def _by_name(places: list[tuple[str, int]] | None, values: list[Any]) -> dict[str, Any]:
    """The values that a row was given, under the names that their columns have now."""
    if places is None:
        raise SchemaChangedError(
            "the table was altered, and a name in the row is another column's now: give it again"
        )
    return {name: values[i] for name, i in places}


def _add_messages(guest: Guest, target: Session | Transaction, topic: Any, messages: Any) -> None:
    found = guest.resolve(topic, "write").value
    typed = found.value_schema is not None
    for value, *more in messages:
        key, partition, headers, micros = (*more, None, None, None, None)[:4]
        value = Encoded(value) if typed and value is not None else value
        headers = None if headers is None else decode_headers(headers)
        at = None if micros is None else _EPOCH + timedelta(microseconds=micros)
        target.send(found, value, key, partition, headers, at)


def _about(guest: Guest, txn: Transaction) -> list[int]:
    return [int(txn.id), int(txn.snapshot), int(txn.age)]


def _serialize(guest: Guest, txn: Transaction, keepalive: bool, address: str) -> Any:
    """A token tells where this server says that it is reached, or where the client reached it."""
    if not guest.client.addresses and len(address) < _LONGEST_ADDRESS:
        guest.client.addresses = (address,)
    return txn.serialize(keepalive)


def _read_part(
    guest: Guest, planning: Planning, topic: str, part: Any, number: int, most: int, may_lose: bool
) -> pa.RecordBatchReader:
    most = min(most, guest.limits.message_bytes)
    batches = planning.read_part(topic, part, number, most, may_lose)
    return pa.RecordBatchReader.from_batches(MESSAGES, batches)


def _commits(guest: Guest, client: Client, parts: Any) -> list[Any]:
    """Commit transactions in this order, as one thread does by `commit_async`.

    Returns:
        The commit timestamp of each, or its error.
    """
    return [_outcome(each) for each in [_committing(guest, *part) for part in parts]]


def _committing(guest: Guest, reference: Reference, calls: Any) -> Future[Any]:
    try:
        txn = guest.resolve(reference, "none").value
        if not isinstance(txn, Transaction):
            raise ValueError("what is committed is a transaction")
        for content in calls:
            value_of(guest, prepared(guest, content))
        return txn.commit_async()
    except (TxnkvError, ValueError, TypeError) as error:
        abort_without(guest, reference, error)
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _outcome(of: Future[Any]) -> Any:
    try:
        return of.result()
    except (TxnkvError, ValueError, TypeError) as error:
        return error


def abort_without(guest: Guest, reference: Reference, error: Exception) -> None:
    """Abort a transaction that was to be committed, where a table or topic of it is gone."""
    if isinstance(error, TableNotFoundError | TopicNotFoundError):
        with suppress(TxnkvError):
            guest.resolve(reference, "none").value.abort_for(str(error))


def _put(guest: Guest, target: Any, number: int) -> Any:
    """Tell the answer of a stream that broke off at its end."""
    found = guest.answers.get(number)
    if found is None:
        raise UnavailableError("the stream of rows broke off, and counts for nothing: write again")
    if not guest.wait(found, _MOST_SECONDS):
        raise UnavailableError("the stream of rows is still being written: look later")
    if found.error is not None:
        raise found.error
    return found.values[-1]


def _next_ids(guest: Guest, table: Table, count: int) -> list[int]:
    """A range of ids: as many as follow each other, at most `count`."""
    first = last = table.next_id()
    for _ in range(min(count, _MOST_IDS) - 1):
        following = table.next_id()
        if following != last + 1:
            break
        last = following
    return [first, last + 1]


def _poll(guest: Guest, consumer: Consumer, most: int, timeout: float) -> dict[str, Any]:
    found = consumer.poll(max_messages=most, timeout=min(timeout, _MOST_SECONDS))
    return _told(found) | {"at": _at(consumer)}


def _told(found: list[Message]) -> dict[str, Any]:
    """Messages, and how many schemas their values may be of."""
    codec = found[0].codec if found else None
    return {"rows": messages_to_arrow(found), "stages": len(codec.stages) if codec else 0}


def _poll_batch(guest: Guest, consumer: Consumer, most: int, timeout: float) -> dict[str, Any]:
    found = consumer.poll_batch(max_messages=most, timeout=min(timeout, _MOST_SECONDS))
    return {"rows": found, "at": _at(consumer)}


def _seek(guest: Guest, consumer: Consumer, partition: int, offset: int) -> dict[int, list[int]]:
    consumer.seek(partition, offset)
    return _at(consumer)


def _seek_to_time(guest: Guest, consumer: Consumer, when: Any) -> dict[int, list[int]]:
    consumer.seek_to_time(when)
    return _at(consumer)


def _at(consumer: Consumer) -> dict[int, list[int]]:
    """Tell where a consumer is, so that another one can go on there."""
    return {number: consumer._place(number) for number in consumer.partitions}


def _consumer(
    guest: Guest, topic: Topic, start: Any, at: dict[int, list[int]], **options: Any
) -> Consumer:
    """One that begins, or goes on where one was that is gone."""
    if not at:
        return topic.consumer(start=start, **options)
    for each in at.values() if isinstance(at, dict) else (at,):  # as `Consumer._place` has it
        if not isinstance(each, list) or len(each) not in (1, 5):
            raise ValueError("a consumer's place makes no sense")
        if not all(type(n) is int and -1 <= n < _MOST_OFFSET for n in each):
            raise ValueError("a consumer's place makes no sense")
    found = topic.consumer(start={number: each[0] for number, each in at.items()}, **options)
    for number, (_, *rest) in at.items():
        if rest:
            found._resume(number, *rest)
    return found


def _receive_many(
    guest: Guest, subscription: Subscription, most: int, timeout: float
) -> dict[str, Any]:
    found = subscription.receive_many(most, min(timeout, _MOST_SECONDS))
    return _told(found)


def _subscribe_again(guest: Guest, topic: Topic, id: int, told: dict[str, Any]) -> Subscription:
    """One that was there. No options: others may have set them, or have more rights."""
    guest.client.require_writable()
    info = guest.client.instance.topics.current(topic.info)
    names = "name", "type", "start", "partitions", "max_bytes"
    if not (isinstance(told, dict) and told.keys() == {*names}):
        raise ValueError("a call makes no sense")
    return subscribe(guest.client, info, id, *[told[name] for name in names])


def _sender(
    guest: Guest, topic: Topic, name: str | None, patience: float, known: Sequence[int] | None
) -> Sender:
    guest.client.require_writable()
    return Sender(guest.client.instance.topics, topic.info, name, patience, known=known)


def _about_sender(sender: Sender) -> dict[str, Any]:
    producer = sender.producer
    return {"partitions": sender.partitions, "producer": [producer.id, producer.epoch]}


def _deliver(guest: Guest, sender: Sender, shares: Sequence[Any]) -> dict[str, Any]:
    found = sender.deliver([(number, batch) for number, batch in shares])
    return {"delivered": found} | _about_sender(sender)


def _batches(guest: Guest, scan: Scan) -> pa.RecordBatchReader:
    batches: Iterator[pa.RecordBatch] = scan.to_batches()  # binds it, and so its schema
    return pa.RecordBatchReader.from_batches(scan.schema, batches)


def _few(guest: Guest, scan: Scan) -> dict[str, Any] | None:
    """Few rows, their snapshot, and the schema where it is another by now; None: batches come."""
    before, rows = scan.schema, scan._few()
    if rows is None or sum(map(lookup.text_bytes, rows)) > _MOST_AT_ONCE:
        return None
    if any(_has_zone(field.type) for field in scan.schema):
        return None  # whose name batches keep
    schema = None if scan.schema.equals(before) else scan.schema
    return {"rows": rows, "snapshot": scan.snapshot, "schema": schema}


def _has_zone(kind: pa.DataType, *, inside: bool = False) -> bool:
    if pa.types.is_timestamp(kind):
        return kind.tz is not None and (inside or kind.tz != "UTC")
    return any(_has_zone(kind.field(i).type, inside=True) for i in range(kind.num_fields))


def _names(kind: str) -> Any:
    """The names that the user may know of."""

    def names(guest: Guest, client: Client) -> list[str]:
        found = client.tables() if kind == "table" else client.topics()
        return [name for name in found if guest.user.may("read", About(kind, name))]  # type: ignore[arg-type]

    return names


_OWN: Final[dict[tuple[str, str], Any]] = {
    ("Client", "tables"): _names("table"),
    ("Client", "topics"): _names("topic"),
    ("Client", "rename_table"): _rename_table,
    ("Attempts", "begin"): lambda guest, attempts, id=0: _begun(guest, id, attempts.begin),
    ("Client", "attempts"): _attempts,
    ("Client", "begin"): _begin,
    ("Client", "outcome"): _end_of,
    ("Client", "transaction_state"): _state,
    ("Client", "join"): lambda _, client, token: Transaction.deserialize(client, token),
    ("Client", "commits"): _commits,
    ("Client", "keep_transaction_alive"): lambda guest, _, id: guest.keep_alive(id),
    ("Client", "planning"): lambda _, client: Planning(client),
    ("Client", "open_scan"): _open_scan,
    ("Client", "open_diff"): _open_diff,
    ("Table", "next_ids"): _next_ids,
    ("Scan", "few"): _few,
    ("Scan", "to_batches"): _batches,
    ("Topic", "consumer"): _consumer,
    ("Topic", "sender"): _sender,
    ("Topic", "subscribe"): _subscribe,
    ("Topic", "subscribe_again"): _subscribe_again,
    ("Sender", "deliver"): _deliver,
    ("Consumer", "poll"): _poll,
    ("Consumer", "poll_batch"): _poll_batch,
    ("Consumer", "seek"): _seek,
    ("Consumer", "seek_to_time"): _seek_to_time,
    ("Subscription", "receive_many"): _receive_many,
    ("Transaction", "about"): _about,
    ("Transaction", "close"): lambda _, txn: txn.drop(),  # what is to be written was flushed
    ("Transaction", "schema_of"): lambda _, txn, of: txn.context.table_at_begin(of.info).schema,
    ("Transaction", "serialize"): _serialize,
    ("Transaction", "start_job"): lambda _, txn: Job.start(txn),
    ("Transaction", "join_job"): lambda _, txn, id: Job.join(txn, id),
    ("Planning", "read_part"): _read_part,
    **{(kind, "rows"): partial(add_each, _add_rows) for kind in ("Session", "Transaction")},
    **{(kind, "sends"): partial(add_each, _add_messages) for kind in ("Session", "Transaction")},
    **{(kind, "put"): _put for kind in ("Session", "Transaction")},
}
