"""Subscriptions: name, kind and options; their rows in status.db; who has one to itself."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import apsw

from txnkv.coordinator import one
from txnkv.errors import (
    OffsetOutOfRangeError,
    TopicNotFoundError,
    UnavailableError,
    as_index,
    require_number,
    require_several,
    require_text,
)
from txnkv.storage import CachedProperty, Store, boot_id
from txnkv.topics import topic_catalog
from txnkv.topics.messages import topic_number
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions

SubscriptionType: TypeAlias = Literal["exclusive", "shared", "failover", "key_shared"]

TYPES: Final = get_args(SubscriptionType)
EXCLUSIVE: Final = "exclusive"
SHARED: Final = "shared"
FAILOVER: Final = "failover"
KEY_SHARED: Final = "key_shared"
MANY: Final = (SHARED, KEY_SHARED)
"""The types with any number of consumers."""


DELAYED: Final = 1 << 61
"""From here on `until` of a lease that nobody has is a time of the wall clock: this, and then
microseconds since 1970. Below it is monotonic, so that a clock that jumps ends no lease."""


_MOST_SECONDS: Final = 1_000_000_000
"""Far below `DELAYED`, and what waits of the interpreter take."""


class SubscriptionOptions(TypedDict, total=False):
    """Options that a call names; those that it does not name stay as they are."""

    lease_seconds: float
    max_deliveries: int | None
    dead_letter: str | None
    redelivery_delay: float
    ack_timeout: float | None
    order: Literal["offset", "commit"]
    isolation: Literal["read_committed", "read_uncommitted"]


@dataclass(frozen=True)
class SubscriptionInfo:
    """A subscription as status.db has it. Picklable: processes that join a transaction by its
    token acknowledge by it.

    Attributes:
        id: in status.db.
        topic: of which topic.
        name: unique in the topic.
        type: "exclusive", "shared", "key_shared": one consumer at a time has messages of a key, or
            "failover": exclusive, and consumers wait for the place.
        lease_seconds: for how long a message of a shared one is one consumer's.
        max_deliveries: after so many a message goes to the dead letter topic; None: never.
        dead_letter: name of that topic.
        redelivery_delay: seconds from a negative ack to the next delivery.
        ack_timeout: seconds after which a message of an exclusive one is delivered again unless
            an ack of it was made; None: never.
        order: of the messages of a partition, "offset" or "commit".
        isolation: "read_committed", or "read_uncommitted": what is not decided too.
        store: the id of its store, where one has it from there; "": it is this one.
        messages: the number by which its messages know its topic.
    """

    id: int
    topic: TopicInfo
    name: str
    type: str
    lease_seconds: float = 30.0
    max_deliveries: int | None = None
    dead_letter: str | None = None
    redelivery_delay: float = 0.0
    ack_timeout: float | None = None
    order: str = "offset"
    isolation: str = "read_committed"
    store: str = field(default="", repr=False, compare=False)

    @CachedProperty
    def messages(self) -> int:
        return topic_number(self.store, self.topic.id)

    @property
    def options(self) -> dict[str, Any]:
        """The options as status.db has them: those that came later only where they say something,
        so that a store that does not use them is as it was.
        """
        found = {name: getattr(self, name) for name in OPTIONS}
        for name in ("order", "isolation"):
            if found[name] == getattr(SubscriptionInfo, name):
                del found[name]
        return found

    def require_partitions(self, numbers: Iterable[int]) -> None:
        """Raise OffsetOutOfRangeError for a number that the topic has not."""
        count = len(self.topic.partitions)
        for number in numbers:
            if not 0 <= number < count:
                raise OffsetOutOfRangeError(f"{self} has partitions 0 to {count - 1}, not {number}")

    def by_partition(
        self, ids: Sequence[tuple[int, int]], *, cumulative: bool
    ) -> dict[int, list[int]]:
        """Return offsets in order, by partition number; of a cumulative ack the highest.

        Raises:
            OffsetOutOfRangeError: as `require_partitions`.
        """
        if len(ids) == 1 and 0 <= ids[0][0] < len(self.topic.partitions):
            number, offset = ids[0]
            return {number: [offset]}
        found: dict[int, set[int]] = {number: set() for number, _ in ids}
        if len(found) == 1:
            found[ids[0][0]] = {offset for _, offset in ids}
        for number, offset in ids if len(found) > 1 else ():
            found[number].add(offset)
        self.require_partitions(found)
        if cumulative:
            return {number: [max(offsets)] for number, offsets in found.items()}
        return {number: sorted(offsets) for number, offsets in found.items()}

    @property
    def reads_otherwise(self) -> bool:
        """Tell whether it has an order or isolation of its own."""
        return (self.order, self.isolation) != ("offset", "read_committed")

    @property
    def by_commit(self) -> bool:
        """Tell whether its order is another one than that of the log: over a side log messages
        stand there as their transactions were committed.
        """
        return self.order == "commit" and self.topic.buffer == "marker"

    @property
    def leased(self) -> bool:
        """Tell whether deliveries are rows in status.db: where several processes share them, or
        where they are counted, also over the death of the consumer, or end.
        """
        return self.type in MANY or (self.max_deliveries, self.ack_timeout) != (None, None)

    def changed(self, options: SubscriptionOptions) -> SubscriptionInfo:
        """With these options, the dead letter topic following from `max_deliveries`.

        Raises:
            TypeError: there is no such option, or `max_deliveries` is no integer.
        """
        unknown = options.keys() - SubscriptionOptions.__annotations__.keys()
        if unknown:
            names = ", ".join(SubscriptionOptions.__annotations__)
            raise TypeError(f"a subscription has options {names}, not {', '.join(sorted(unknown))}")
        info = replace(self, **options)
        require_number("redelivery_delay", options.get("redelivery_delay", 0))
        if info.max_deliveries is not None:
            info = replace(info, max_deliveries=as_index("max_deliveries", info.max_deliveries))
        if info.max_deliveries is None and "dead_letter" not in options:
            return replace(info, dead_letter=None)
        if info.max_deliveries is not None and info.dead_letter is None:
            return replace(info, dead_letter=_dead_letter(info.topic, info.name))
        return info

    @property
    def delays(self) -> bool:
        """Tell whether a message waits for its time. In the order of offsets it would keep all
        behind it waiting, so that the types that keep that order deliver it at once.
        """
        return self.type in MANY

    @property
    def lease_time(self) -> float | None:
        """Seconds for which a delivered message is its consumer's; None: until that ends."""
        return self.lease_seconds if self.type in MANY else self.ack_timeout

    def __str__(self) -> str:
        return f"subscription {self.name!r} of topic {self.topic.name!r}"


OPTIONS: Final = tuple(SubscriptionOptions.__annotations__)


class Place(NamedTuple):
    """The one consumer of an exclusive subscription: a process, and which one of it."""

    slot: int
    start: int
    consumer: int


def check(info: SubscriptionInfo) -> None:
    """Refuse options that make no sense.

    Raises:
        ValueError: they make none.
    """
    if not info.name or not isinstance(info.name, str):
        raise ValueError(f"a subscription's name is a non-empty string, not {info.name!r}")
    if info.type not in TYPES:
        raise ValueError(f"type is one of {', '.join(TYPES)}, not {info.type!r}")
    _require_seconds("lease_seconds is above 0", info.lease_seconds)
    if info.ack_timeout is not None:
        _require_seconds("ack_timeout is None or above 0", info.ack_timeout)
    if info.ack_timeout is not None and info.type in MANY:
        raise ValueError(
            "ack_timeout is for exclusive subscriptions: shared ones have lease_seconds"
        )
    if info.max_deliveries is not None and info.max_deliveries < 1:
        raise ValueError(f"max_deliveries is None or at least 1, not {info.max_deliveries!r}")
    if not isinstance(info.dead_letter, str | None):
        raise TypeError(f"dead_letter is the name of a topic, not {info.dead_letter!r}")
    if info.dead_letter == "":
        raise ValueError("dead_letter is the name of a topic, not ''")
    if info.dead_letter is not None and info.max_deliveries is None:
        raise ValueError("dead_letter goes with max_deliveries, the number of deliveries before it")
    if info.order not in ("offset", "commit"):
        raise ValueError(f"order is 'offset' or 'commit', not {info.order!r}")
    if info.isolation not in ("read_committed", "read_uncommitted"):
        raise ValueError(
            "isolation of a subscription is 'read_committed' or 'read_uncommitted', not "
            f"{info.isolation!r}"
        )
    if info.order == "commit" and info.isolation == "read_uncommitted":
        raise ValueError("order='commit' shows what is committed: take isolation='read_committed'")
    if info.by_commit and info.leased:
        raise ValueError(
            "order='commit' of a topic with buffer='marker' is for exclusive and failover "
            "subscriptions without max_deliveries and ack_timeout"
        )
    if info.redelivery_delay != 0:
        _require_seconds("redelivery_delay is at least 0", info.redelivery_delay)
    if info.dead_letter == info.topic.name:
        raise ValueError(f"{info} cannot be its own dead letter topic")


def _require_seconds(rule: str, given: float) -> None:
    require_number(rule.split()[0], given)
    if not 0 < given <= _MOST_SECONDS:
        raise ValueError(f"{rule} and at most {_MOST_SECONDS:,} seconds, not {given!r}")


def find(cur: apsw.Cursor, topic: TopicInfo, name: str) -> SubscriptionInfo | None:
    require_text("a subscription's name", name)
    found: Any = cur.execute(
        "SELECT id, type, options FROM subscriptions WHERE topic_id = ? AND name = ?",
        (topic.id, name),
    ).fetchone()
    if found is None:
        return None
    id, type, options = found
    return _stored(topic, id, name, type, options)


def of_topic(cur: apsw.Cursor, topic: TopicInfo) -> list[SubscriptionInfo]:
    found: list[Any] = cur.execute(
        "SELECT id, name, type, options FROM subscriptions WHERE topic_id = ? ORDER BY name",
        (topic.id,),
    ).fetchall()
    return [_stored(topic, *row) for row in found]


def _stored(topic: TopicInfo, id: int, name: str, type: str, options: str) -> SubscriptionInfo:
    said = json.loads(options)
    if said.get("dead_letter") == "":  # as it was let pass
        said["dead_letter"] = _dead_letter(topic, name)
    return SubscriptionInfo(id, topic, name, type, **said)


def _dead_letter(topic: TopicInfo, name: str) -> str:
    return f"{topic.name}.{name}.dead"


def make(cur: apsw.Cursor, wanted: SubscriptionInfo, starts: dict[int, int]) -> SubscriptionInfo:
    """Add a subscription with its cursors; its options are to be set.

    Args:
        wanted: its id does not count.
        starts: where cursors begin, by partition id.
    """
    cur.execute(
        "INSERT INTO subscriptions (topic_id, name, type, options, leased) "
        "VALUES (?, ?, ?, '{}', ?)",
        (wanted.topic.id, wanted.name, wanted.type, wanted.leased),
    )
    id = cur.connection.last_insert_rowid()
    cur.executemany(
        "INSERT INTO cursors (subscription_id, partition_id, mark_delete, dispatched) "
        "VALUES (?1, ?2, ?3, ?3)",
        [(id, partition_id, offset) for partition_id, offset in starts.items()],
    )
    # It may have got partitions since the starts were looked up.
    cur.execute(_COVER.format("subscriptions.id"), (id,))
    return replace(wanted, id=id)


_COVER: Final = (
    "INSERT OR IGNORE INTO cursors (subscription_id, partition_id, mark_delete, dispatched) "
    "SELECT subscriptions.id, partitions.id, 0, 0 "
    "FROM subscriptions JOIN partitions USING (topic_id) WHERE {} = ?"
)


def cover(cur: apsw.Cursor, topic: TopicInfo) -> None:
    """Give the subscriptions of a topic cursors in partitions that were added: at their beginning,
    wherever a subscription was to start.
    """
    cur.execute(_COVER.format("topic_id"), (topic.id,))
    cur.execute("UPDATE subscriptions SET version = version + 1 WHERE topic_id = ?", (topic.id,))


def set_options(cur: apsw.Cursor, info: SubscriptionInfo, *, anew: bool = True) -> None:
    """Give a subscription these options, and make the dead letter topic that they name.

    Args:
        anew: False where it had them before: that topic is as it was left, or gone.

    Raises:
        ValueError: that topic holds other values.
        NotSupportedError: it is a copy.
    """
    if info.dead_letter is not None and anew:
        _provide_dead_letter(cur, info, info.dead_letter)
    (leased,) = one(cur, "SELECT leased FROM subscriptions WHERE id = ?", (info.id,))
    if leased != info.leased:
        _begin_anew(cur, info.id)
    cur.execute(
        "UPDATE subscriptions SET options = ?, leased = ? WHERE id = ?",
        (json.dumps(info.options, default=float), info.leased, info.id),
    )


def provide_dead_letter(cur: apsw.Cursor, info: SubscriptionInfo) -> None:
    """Make the dead letter topic where it was dropped; one that is there stays as it is."""
    if info.dead_letter is not None and topic_catalog.find(cur, info.dead_letter) is None:
        _provide_dead_letter(cur, info, info.dead_letter)


def _provide_dead_letter(cur: apsw.Cursor, info: SubscriptionInfo, name: str) -> None:
    topic = topic_catalog.get(cur, info.topic.name)
    found = topic_catalog.find(cur, name)
    if found is None:
        options = TopicOptions().with_values(topic.options.values)
        topic_catalog.create(cur, name, 1, "marker", options)
        return
    topic_catalog.require_writable(found)
    if found.options.value_schema not in (None, topic.options.value_schema):
        raise ValueError(
            f"{info} cannot have topic {name!r} for its dead letters: that has another value "
            "schema. Name one with the same, or without"
        )


def letters_alike(cur: apsw.Cursor, topic: TopicInfo) -> list[TopicInfo]:
    """The topics of dead letters of a topic that have the same schemas of values as it has now."""
    there = topic_catalog.get(cur, topic.name).options.values
    names = {info.dead_letter for info in of_topic(cur, topic) if info.dead_letter is not None}
    found = (topic_catalog.find(cur, name) for name in sorted(names - {topic.name}))
    return [each for each in found if each is not None and each.options.values == there]


def look_again(cur: apsw.Cursor, subscription_id: int) -> None:
    """Have consumers read from the cursors on where nothing is leased: what goes with messages that
    are deleted, and is not, keeps no cursor for ever.
    """
    cur.execute(
        "UPDATE cursors SET dispatched = mark_delete WHERE subscription_id = ?1 AND partition_id "
        "NOT IN (SELECT partition_id FROM leases WHERE subscription_id = ?1)",
        (subscription_id,),
    )


def _begin_anew(cur: apsw.Cursor, id: int) -> None:
    """Whatever was delivered and not deleted is delivered again, from the cursors on."""
    cur.execute("DELETE FROM leases WHERE subscription_id = ?", (id,))
    cur.execute("DELETE FROM returned_acks WHERE subscription_id = ?", (id,))
    cur.execute("UPDATE cursors SET dispatched = mark_delete WHERE subscription_id = ?", (id,))


def drop(cur: apsw.Cursor, id: int) -> bool:
    """Forget a subscription, with its cursors and what is pending."""
    cur.execute("DELETE FROM subscriptions WHERE id = ?", (id,))
    return cur.connection.changes() > 0


def require(cur: apsw.Cursor, info: SubscriptionInfo) -> None:
    """Refuse a subscription that was dropped.

    Raises:
        TopicNotFoundError: it was, or its topic.
    """
    topic_catalog.require_live(cur, info.topic)
    if cur.execute("SELECT 1 FROM subscriptions WHERE id = ?", (info.id,)).fetchone() is None:
        raise dropped(info)


def dropped(info: SubscriptionInfo) -> TopicNotFoundError:
    return TopicNotFoundError(f"{info} was dropped: subscribe again")


def consumer_of(
    cur: apsw.Cursor, store: Store, info: SubscriptionInfo, live: set[int]
) -> str | None:
    """Return the process of the one consumer of a subscription; None: the place is free.

    Args:
        live: consumers of this process.

    Raises:
        TopicNotFoundError: the subscription was dropped.
    """
    found: Any = cur.execute(
        "SELECT slot, start, consumer FROM subscriptions WHERE id = ?", (info.id,)
    ).fetchone()
    if found is None:
        raise dropped(info)
    slot, start, consumer = found
    runtime = store.runtime
    if slot is None or not runtime.slot_alive(slot, start):
        return None
    if (slot, start) != runtime.owner:
        return f"process {runtime.slot_owner(slot)}"
    return "this process" if consumer in live else None


def has_consumer(info: SubscriptionInfo, who: str) -> UnavailableError:
    return UnavailableError(
        f"{info} is {info.type}, and has a consumer in {who}: close that one, or make a "
        "subscription with type='shared'"
    )


def take_place(cur: apsw.Cursor, info: SubscriptionInfo, place: Place) -> None:
    """Be the one consumer of a subscription whose place is free."""
    cur.execute(
        "UPDATE subscriptions SET slot = ?, start = ?, consumer = ? WHERE id = ?",
        (*place, info.id),
    )
    cur.execute("DELETE FROM returned_acks WHERE subscription_id = ?", (info.id,))


def give_place(cur: apsw.Cursor, info: SubscriptionInfo, place: Place) -> None:
    """The next one may consume, if it is this one's place still."""
    cur.execute(
        "UPDATE subscriptions SET slot = NULL WHERE id = ? AND slot = ? AND start = ? "
        "AND consumer = ?",
        (info.id, *place),
    )


def check_boot(cur: apsw.Cursor, info: SubscriptionInfo) -> None:
    """Times of leases that an earlier boot of the machine noted have passed."""
    boot = boot_id()
    found: Any = cur.execute("SELECT boot FROM subscriptions WHERE id = ?", (info.id,)).fetchone()
    if found is not None and found[0] != boot:
        cur.execute(
            "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
            "AND until IS NOT NULL AND NOT (slot IS NULL AND until >= ?)",
            (info.id, DELAYED),
        )
        cur.execute("UPDATE subscriptions SET boot = ? WHERE id = ?", (boot, info.id))


def chosen_partitions(
    topic: TopicInfo, type: str, partitions: Collection[int] | None
) -> list[int] | None:
    """The numbers of the partitions that a consumer is to read; None: all.

    Raises:
        ValueError: the topic has one of them not, there is none, or the type wants all.
    """
    require_several("partitions", () if partitions is None else partitions, "numbers")
    if partitions is None:
        return None
    if type == KEY_SHARED:
        raise ValueError("consumers of a key_shared subscription read all partitions: name none")
    numbers = sorted({as_index("a partition", number) for number in partitions})
    if not (numbers and set(numbers) <= set(range(len(topic.partitions)))):
        raise ValueError(
            f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}: name some of "
            f"them, not {partitions!r}"
        )
    return numbers
