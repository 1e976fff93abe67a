"""The clients of a server, and the handles that each has there.

    guest "5f0c..."    user ann, heard of 0.4 s ago
      1   Transaction                2   Session of it            5   Scan of orders
      requests  41: its answer       42: being worked on

A guest is given up when it says so, or when it was not heard of for its keepalive time: its handles
are closed, so that places of subscriptions, leases and pinned history are free again. Transactions
that nobody else knows of are rolled back with it; the others lose a heartbeat, no more.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from txnkv.client import Client, Table, Topic
from txnkv.coordinator import TxnId
from txnkv.errors import (
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    RowErrors,
    SchemaChangedError,
    SchemaError,
    TableNotFoundError,
    TopicNotFoundError,
    TxnkvError,
    UnavailableError,
)
from txnkv.remote import LostHandleError, Right
from txnkv.server.users import About, Limits, Taken, User
from txnkv.storage import new_condition, new_event, new_lock
from txnkv.tables import table_catalog
from txnkv.topics import SubscriptionInfo
from txnkv.transaction import Transaction

_log = logging.getLogger("txnkv.server")

_MADE_SOON: Final = 5.0
"""Seconds for which a call waits for a handle that another request of its client makes."""

_TRIM_SECONDS: Final = 60.0
"""Seconds between returns of free memory to the system: glibc keeps what is free in pieces."""

_KEPT_ANSWERS: Final = 1000
_KEPT_DROPS: Final = 5000
_KNOWN: Final = 256
_SPARE_IDS: Final = 256


@dataclass
class Reference:
    """A handle, table, topic or subscription as a request names it."""

    kind: str
    content: Any


class Answer:
    """A request that must not be made twice: its answer, once there is one."""

    def __init__(self) -> None:
        self.done = False
        self.values: list[Any] = []
        self.error: BaseException | None = None


@dataclass(slots=True)
class Held:
    """A handle of a guest.

    Attributes:
        value: the twin, or the error that it could not be made for.
        about: the table or topic that it is of, which rights are asked for.
    """

    value: Any
    about: About | None = None


@dataclass
class Guest:
    """One client.

    Attributes:
        birth: tells it from an earlier guest of this id, whose handles are gone.
        client: opened for it, so that its transactions have its keepalive time.
        taken: by its user, of this guest and others.
        lost: handles up to this number were those of an earlier guest of this id.
    """

    id: str
    user: User
    client: Client
    limits: Limits
    taken: Taken
    lost: int = 0
    birth: str = field(default_factory=lambda: uuid.uuid4().hex)
    seen: float = field(default_factory=time.monotonic)
    busy: int = 0
    closed: bool = False
    handles: dict[int, Held] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=new_lock)
    _waiting: int = 0
    _known: dict[tuple[str, str, int], Any] = field(default_factory=dict)
    _spare: set[int] = field(default_factory=set)
    _early: dict[int, None] = field(default_factory=dict)  # dropped, and perhaps not made yet
    _forgotten: int = 0

    def __post_init__(self) -> None:
        self._changed = new_condition(self._lock)

    # -- handles -----------------------------------------------------------------------

    def add(self, number: int, value: Any, about: About | None) -> None:
        """Keep a handle, under the number that the client gave it.

        Raises:
            LostHandleError: the client was given up meanwhile, and so is the handle.
        """
        with self._lock:
            before = self.handles.get(number)
            closed, dropped = self.closed, number in self._early
            if not (closed or dropped):
                self.handles[number] = Held(value, about)
            self._tell()
        if closed or dropped:
            give_up(value)
            if closed:
                raise lost()
            return
        self.taken.add(value, 1)
        if before is not None:
            self.taken.add(before.value, -1)

    def require_room(self, *, begins: bool) -> None:
        """Refuse one more handle, as of a transaction that `begins`, where the user has too many.

        Raises:
            UnavailableError: that is so.
        """
        limits, name = self.limits, self.user.name
        if (have := self.taken.handles) >= limits.handles:
            raise UnavailableError(
                f"user {name!r} has {have:,} handles, and may have no more: close some"
            )
        if begins and (have := self.taken.transactions(limits.transactions)) >= limits.transactions:
            raise UnavailableError(
                f"user {name!r} has {have:,} open transactions, and may have no more: "
                "commit or roll back some"
            )

    def find(self, number: Any) -> Held:
        """Return a handle, which another request may be about to make.

        Raises:
            LostHandleError: there is none.
            TxnkvError: it could not be made.
        """
        if type(number) is not int:
            raise ValueError(f"a handle is a number, not {number!r}")
        if number == 0:
            return Held(self.client)
        found = self.handles.get(number)
        if found is None and number > self.lost and number not in self._early:
            self._await(lambda: number in self.handles, _MADE_SOON)
            found = self.handles.get(number)
        if found is None:
            raise lost()
        if isinstance(found.value, BaseException):
            raise found.value.with_traceback(None)
        return found

    def drop(self, numbers: Iterable[Any], *, before: bool = False) -> list[int]:
        """Close handles that their client has dropped, and return the numbers of those that are
        not there. These are closed as soon as another request makes them.

        Args:
            before: this request may make them: let it, and drop those that are returned.
        """
        missing = []
        for number in numbers:
            if type(number) is not int:
                continue
            with self._lock:
                found = self.handles.pop(number, None)
                if found is None and not before:
                    self._early[number] = None
                    if len(self._early) > _KEPT_DROPS:
                        del self._early[next(iter(self._early))]
            if found is None:
                missing.append(number)
            else:
                self.taken.add(found.value, -1)
                give_up(found.value)
        return missing

    # -- ids of transactions -----------------------------------------------------------

    def spare_id(self) -> int:
        """Return an id for a transaction that this client begins later; 0: it needs none."""
        coordinator = self.client.instance.coordinator
        with self._lock:
            if self.closed or len(self._spare) >= _SPARE_IDS:
                return 0
            local = coordinator.ids.begin()
            self._spare.add(local)
        return int(TxnId.of(coordinator.tcid, local))

    def take_id(self, id: Any) -> int:
        """Take an id that the client was given for a transaction.

        Raises:
            LostHandleError: it has none such, or is not to use it any more.
        """
        if type(id) is not int:
            raise ValueError(f"a transaction's id is a number, not {id!r}")
        local = TxnId(id).local
        with self._lock:
            if local not in self._spare:
                raise lost()
            self._spare.remove(local)
        return local

    def void_id(self, id: int) -> None:
        """See that no transaction begins with an id from now on, where it was a spare one."""
        local = self.client.instance.local_id(id)
        with self._lock:
            spare = local in self._spare
            self._spare.discard(local)
        if spare:
            self.client.instance.coordinator.ids.ended(local)

    def transaction(self, id: int) -> Transaction | None:
        """Return this client's transaction of an id; None: it has none."""
        local, held = self.client.instance.local_id(id), list(self.handles.values())
        mine = (each.value for each in held if isinstance(each.value, Transaction))
        return next((each for each in mine if each.id.local == local), None)

    def keep_alive(self, id: int) -> None:
        """Prolong a transaction: one of this client, or anybody's by who may write."""
        if self.transaction(id) is None:
            self.user.require("write")
        self.client.keep_transaction_alive(id)

    @property
    def ids(self) -> dict[str, Any]:
        """The ids of the store's coordinator, and of the store."""
        instance = self.client.instance
        return {"tcid": instance.coordinator.tcid, "store": instance.store.store_id}

    # -- what requests name ------------------------------------------------------------

    def resolve(self, reference: Reference, right: Right) -> Held:
        """Return what a request names, for a user who has this right to it."""
        if not isinstance(reference, Reference):
            raise ValueError(f"a request names what it is about by {type(reference).__name__}")
        if reference.kind == "h":
            found = self.find(reference.content)
            if found.about is not None:
                self.user.require(right, found.about)
            return found
        if reference.kind == "table":
            name, number = reference.content
            self.user.require(right, About("table", name))
            table = self._table(name, number)
            now = table.name
            if now != name:
                self.user.require(right, About("table", now))
            return Held(table, About("table", now))
        if reference.kind == "topic":
            name, number = reference.content
            self.user.require(right, About("topic", name))
            return Held(self._topic(name, number), About("topic", name))
        if reference.kind == "sub":
            topic, number, name, store = reference.content
            self.user.require(right, About("topic", topic))
            info = self._subscription(self._topic(topic, number), name)
            return Held(replace(info, store=store))
        raise ValueError(f"a request names a {reference.kind!r}")

    def _table(self, name: str, number: int) -> Table:
        def find() -> Table:
            if type(number) is not int:
                raise ValueError(f"a table is known by its id, not {number!r}")
            with self.client.instance.store.status.read() as cur:
                info = table_catalog.by_id(cur, number)  # it may have another name by now
            if info is not None and info.index_of is None:
                return Table(self.client, info)
            if name not in self.client.tables():
                raise TableNotFoundError(f"table {name!r} was dropped")
            raise TableNotFoundError(
                f"table {name!r} was dropped, and another one made: take client.table({name!r})"
            )

        found: Table = self._cached(("table", name, number), find)
        return found

    def _topic(self, name: str, number: int) -> Topic:
        def find() -> Topic:
            try:
                found = self.client.topic(name)
            except TopicNotFoundError:
                raise TopicNotFoundError(f"topic {name!r} was dropped") from None
            if found.info.id != number:
                raise TopicNotFoundError(
                    f"topic {name!r} was dropped, and another one made: take client.topic({name!r})"
                )
            return found

        found: Topic = self._cached(("topic", name, number), find)
        return found

    def _cached(self, key: tuple[str, str, int], find: Callable[[], Any]) -> Any:
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[key] = find()
        return found

    def _subscription(self, topic: Topic, name: str) -> SubscriptionInfo:
        for found in self.client.instance.topics.subscriptions.of_topic(topic.info):
            if found.name == name:
                return found
        raise TopicNotFoundError(f"topic {topic.name!r} has no subscription {name!r}")

    # -- requests ----------------------------------------------------------------------

    def work(self, count: int) -> None:
        """Count a request that begins (1) or ends (-1) to be worked on: it is a sign of life."""
        with self._lock:
            self.busy += count
            self.seen = time.monotonic()

    def answer_of(self, number: int, *, asked: bool, known: bool) -> tuple[Answer, bool]:
        """Return the answer of a request, and whether it is still to be worked out, here.

        Args:
            number: of the request.
            asked: it was sent before.
            known: to this guest, not to an earlier one of its id.

        Raises:
            CommitOutcomeUnknownError: an earlier guest of this id may have done it.
        """
        with self._lock:
            found = self.answers.get(number)
            if found is not None:
                return found, False
            if asked and (not known or number <= self._forgotten):
                raise CommitOutcomeUnknownError(
                    "the server was started again, or had given up this client or the answer, "
                    "before that was heard. Nobody knows whether the call was done: look, before "
                    "it is made again",
                    0,
                )
            while len(self.answers) >= _KEPT_ANSWERS:
                self._forgotten = max(next(iter(self.answers)), self._forgotten)
                del self.answers[next(iter(self.answers))]
            made = self.answers[number] = Answer()
            return made, True

    def finish(self, answer: Answer) -> None:
        """Give an answer to those who wait for it; its request ends to be worked on."""
        with self._lock:
            self.busy -= 1
            self.seen = time.monotonic()
            answer.done = True
            self._tell()

    def wait(self, answer: Answer, seconds: float) -> bool:
        """Wait for an answer; whether it is there."""
        return self._await(lambda: answer.done, seconds)

    def _tell(self) -> None:
        """Tell of a change, under the lock; mostly nobody waits for one."""
        if self._waiting:
            self._changed.notify_all()

    def _await(self, met: Callable[[], bool], seconds: float) -> bool:
        with self._lock:
            self._waiting += 1
            try:
                return self._changed.wait_for(met, seconds)
            finally:
                self._waiting -= 1

    def forget(self, numbers: Iterable[Any]) -> None:
        """Forget answers that the client has."""
        with self._lock:
            for number in numbers:
                if isinstance(number, int):
                    self.answers.pop(number, None)

    def close(self) -> None:
        """Give up all that it has."""
        with self._lock:
            self.closed = True
            values = [each.value for each in list(self.handles.values())]
            self.handles.clear()
            spare, self._spare = self._spare, set()
        for value in reversed(values):
            self.taken.add(value, -1)
            give_up(value)
        for local in spare:
            self.client.instance.coordinator.ids.ended(local)
        with suppress(TxnkvError):
            self.client.close()


def lost() -> LostHandleError:
    """The error for a handle that is not there."""
    return LostHandleError(
        "the server has not this handle any more: it was started again, or had not heard of this "
        "client for its keepalive time. What was not committed is not; begin again"
    )


def require_reference(name: str, args: Sequence[Any], named: Mapping[str, Any] | None) -> None:
    """Refuse a call that names its table, topic or subscription in another way, as by a text: of
    references alone rights are asked.
    """
    by_word = named or {}
    words = (by_word.get(word) for word in ("table", "topic", "subscription"))
    given = args[0] if args else next(filter(None, words), None)
    if not isinstance(given, Reference):
        raise ValueError(f"{name} takes a table, topic or subscription by a reference")


def require_table(guest: Guest, client: Client, parts: Any) -> None:
    """By the tablets that a token names, not by the name that stands in it."""
    guest.user.require("read", About("table", parts.table))
    for tablet_id, _, _ in parts.parts:
        tablet = client.instance.engine.tablet(tablet_id)
        if tablet is not None:
            name = client.instance.engine.current(tablet.table).name
            guest.user.require("read", About("table", name))


def add_each(add: Callable[..., None], guest: Guest, target: Any, many: Any) -> None:
    """Take what waits for several tables or topics; where one is gone the others are kept."""
    failed: list[TxnkvError] = []
    for each in many:
        try:
            add(guest, target, *each)
        except TxnkvError as error:
            changed = isinstance(error, SchemaError | SchemaChangedError)
            if changed and isinstance(target, Transaction):
                target.abort_for(str(error))  # nobody has these rows any more
            failed.append(refused(error))
    if failed:
        raise together(failed)


def refused(error: TxnkvError) -> TxnkvError:
    """Return an error by which some of what waited at a client is not taken, for ever, and what is
    beside it is. Others are raised: after these nothing is taken, or the client sends all again.
    """
    if isinstance(error, UnavailableError | RowErrors | InvalidTxnStateError | SchemaChangedError):
        raise error
    return error


def together(errors: Sequence[TxnkvError]) -> TxnkvError:
    """Return an error that tells of several, by each of which something is not taken."""
    first, said = errors[0], dict.fromkeys(map(str, errors))
    if len(said) > 1 and isinstance(first, SchemaError | TableNotFoundError | TopicNotFoundError):
        return type(first)("; ".join(said))
    return first


def give_up(value: Any) -> None:
    """Close a handle that nobody uses any more."""
    try:
        if hasattr(value, "commit") and hasattr(value, "serialize"):
            _leave_transaction(value)
        elif hasattr(value, "discard"):
            value.discard()
            value.close()
        elif hasattr(value, "close"):
            value.close()
    except TxnkvError as error:
        _log.info("%s was given up: %s", type(value).__name__, error)
    except Exception:  # whatever it is, the others are given up too
        _log.exception("%s could not be given up", type(value).__name__)


def _leave_transaction(txn: Any) -> None:
    """End what nobody else can end; what others may know of is theirs, and lives by heartbeats."""
    context = txn.context
    if not context.local.ended and not context.stored:
        txn.rollback()
    txn.drop()


class Guests:
    """All clients of a server. Shared by threads.

    Args:
        open_client: opens the store for a client with a keepalive time.
        limits: of each user.
    """

    def __init__(self, open_client: Callable[[float], Client], limits: Limits) -> None:
        self._open = open_client
        self._limits = limits
        self._lock = new_lock()
        self._guests: dict[str, Guest] = {}
        self._taken: dict[str, Taken] = {}
        self._stop = new_event()
        self._thread = threading.Thread(target=self._watch, name="txnkv-guests", daemon=True)
        self._thread.start()

    def of(self, id: Any, keepalive: Any, user: User, lost: Any = 0) -> Guest:
        """Return the guest of an id, a new one if need be.

        Args:
            lost: of a new one: the last handle that its client has, of an earlier guest.

        Raises:
            ValueError: it has no sound id or keepalive time, or is another user's.
            UnavailableError: the user has too many.
        """
        if not isinstance(id, str) or not 16 <= len(id) <= 64:
            raise ValueError("a request names the client that sends it")
        known = self._guests.get(id)
        if known is not None and known.user is user:
            known.seen = time.monotonic()
            return known
        if not isinstance(keepalive, int | float) or not 0.5 <= keepalive <= 86400:
            raise ValueError(f"a keepalive time is 0.5 to 86,400 s, not {keepalive!r}")
        if type(lost) is not int:
            raise ValueError(f"a handle is a number, not {lost!r}")
        with self._lock:
            found = self._guests.get(id)
            if found is None:
                mine = sum(each.user.name == user.name for each in self._guests.values())
                if mine >= self._limits.guests:
                    raise UnavailableError(
                        f"user {user.name!r} has {mine} clients, and may have no more: close some"
                    )
                client = self._open(float(keepalive))
                taken = self._taken.setdefault(user.name, Taken())
                found = self._guests[id] = Guest(id, user, client, self._limits, taken, lost)
            if found.user.name != user.name:
                raise ValueError("this client's id is another user's")
            found.user = user
            found.seen = time.monotonic()
            return found

    def has(self, id: Any) -> bool:
        """Tell whether a guest is known."""
        return id in self._guests

    def end(self, id: Any, user: User) -> None:
        """Give up a guest that says good-bye."""
        with self._lock:
            found = self._guests.get(id)
            if found is None or found.user.name != user.name:
                return
            del self._guests[id]
        found.close()

    def close(self, *, busy: bool = True) -> None:
        """Give up all of them, or but for those with calls under way."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            every, self._guests = [g for g in self._guests.values() if busy or not g.busy], {}
        for guest in every:
            guest.close()

    def _watch(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        trimmed = time.monotonic()
        while not self._stop.wait(0.25):
            now = time.monotonic()
            if trim is not None and now - trimmed > _TRIM_SECONDS:
                trimmed = now
                trim(0)
            with self._lock:
                gone = [
                    each
                    for each in self._guests.values()
                    if not each.busy and now - each.seen > each.client.keepalive_time
                ]
                for guest in gone:
                    del self._guests[guest.id]
            for guest in gone:
                _log.info("client %s of %s is gone", guest.id[:8], guest.user.name)
                guest.close()
