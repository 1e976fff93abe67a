"""The catalog of topics in status.db, and all tables there that belong to topics.

Changes of the catalog take effect at once, outside of transactions. The meaning of a row of the
other tables stands where it is used; offsets of ranges are half open: `first` is in it, `last` is
not. All tables but one came with version 3, at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

import apsw
import pyarrow as pa

from txnkv import errors
from txnkv.coordinator import next_timestamp, one, payload
from txnkv.errors import NotSupportedError, TopicExistsError, TopicNotFoundError, require_number
from txnkv.storage import VALUE_SCHEMAS, CachedProperty, StoreDirectory
from txnkv.topics.messages import ValueCodec, ValueStage, value_codec, values

Buffer: TypeAlias = Literal["marker", "sidecar"]
Compression: TypeAlias = Literal["lz4", "zstd"]
Cleanup: TypeAlias = Literal["delete", "compact"]

_CATALOG = """
CREATE TABLE topics (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    name        TEXT NOT NULL,
    buffer      TEXT NOT NULL,       -- marker or sidecar
    options     TEXT NOT NULL,       -- JSON
    dropped_ts  INTEGER
);
CREATE UNIQUE INDEX topics_by_name ON topics (name) WHERE dropped_ts IS NULL;
CREATE TABLE partitions (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    topic_id     INTEGER NOT NULL REFERENCES topics ON DELETE CASCADE,
    number       INTEGER NOT NULL,
    next_offset  INTEGER NOT NULL DEFAULT 0,  -- what is below it was given to somebody
    UNIQUE (topic_id, number)
);
CREATE TABLE end_markers (               -- given their offsets, perhaps not yet in the log
    partition_id      INTEGER NOT NULL REFERENCES partitions ON DELETE CASCADE,
    first_offset      INTEGER NOT NULL,
    count             INTEGER NOT NULL,  -- offsets that the marker takes
    txn_id            INTEGER NOT NULL,
    type              INTEGER NOT NULL,  -- as in the control batch
    commit_ts         INTEGER NOT NULL,
    low_water_mark    INTEGER NOT NULL,
    txn_first_offset  INTEGER NOT NULL,  -- of the transaction in this log
    PRIMARY KEY (partition_id, first_offset)
) WITHOUT ROWID;
CREATE INDEX end_markers_by_transaction ON end_markers (txn_id);
"""
_PRODUCERS = """
CREATE TABLE producers (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given again
    topic_id   INTEGER NOT NULL REFERENCES topics ON DELETE CASCADE,
    name       TEXT,                               -- NULL: it can fence nobody
    epoch      INTEGER NOT NULL,                   -- of the producer that may send
    began      INTEGER NOT NULL,                   -- when that one was made, microseconds
    last_used  INTEGER NOT NULL,                   -- microseconds
    sent       INTEGER NOT NULL                    -- messages of all who had this name and id
);
CREATE UNIQUE INDEX producers_by_name ON producers (topic_id, name) WHERE name IS NOT NULL;
CREATE TABLE producer_states (
    producer_id     INTEGER NOT NULL,
    partition_id    INTEGER NOT NULL REFERENCES partitions ON DELETE CASCADE,
    last_timestamp  INTEGER NOT NULL,              -- microseconds
    state           BLOB    NOT NULL,              -- epoch and the last five batches
    PRIMARY KEY (producer_id, partition_id)
) WITHOUT ROWID;
CREATE INDEX producer_states_by_time ON producer_states (last_timestamp);
CREATE INDEX producer_states_by_partition ON producer_states (partition_id);
"""
_SUBSCRIPTIONS = """
CREATE TABLE subscriptions (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    topic_id  INTEGER NOT NULL REFERENCES topics ON DELETE CASCADE,
    name      TEXT    NOT NULL,
    type      TEXT    NOT NULL,            -- exclusive or shared
    options   TEXT    NOT NULL,            -- JSON
    leased    INTEGER NOT NULL,            -- 1: deliveries are rows of `leases`
    slot      INTEGER,                     -- the one consumer of an exclusive one: its process's
    start     INTEGER,                     -- slot of the runtime file and when that was taken
    consumer  INTEGER,                     -- and which one of that process
    boot      TEXT,                        -- to which times of its leases belong
    version   INTEGER NOT NULL DEFAULT 0,  -- changes with what its consumer does not do itself
    UNIQUE (topic_id, name)
);
CREATE TABLE cursors (
    subscription_id  INTEGER NOT NULL REFERENCES subscriptions ON DELETE CASCADE,
    partition_id     INTEGER NOT NULL REFERENCES partitions ON DELETE CASCADE,
    mark_delete      INTEGER NOT NULL,     -- all below is deleted
    dispatched       INTEGER NOT NULL,     -- all below was looked at; with leases
    PRIMARY KEY (subscription_id, partition_id)
) WITHOUT ROWID;
CREATE INDEX cursors_by_partition ON cursors (partition_id);
CREATE TABLE acked_ranges (                -- deleted beyond mark_delete: apart from each other
    subscription_id  INTEGER NOT NULL,
    partition_id     INTEGER NOT NULL,
    first            INTEGER NOT NULL,
    last             INTEGER NOT NULL,
    PRIMARY KEY (subscription_id, partition_id, first),
    FOREIGN KEY (subscription_id, partition_id) REFERENCES cursors ON DELETE CASCADE
) WITHOUT ROWID;
CREATE TABLE pending_acks (
    subscription_id  INTEGER NOT NULL,
    partition_id     INTEGER NOT NULL,
    txn_id           INTEGER NOT NULL,     -- below 0: of an attempt of client.run that failed
    first            INTEGER NOT NULL,     -- -1: cumulative, all below last
    last             INTEGER NOT NULL,
    stored           INTEGER NOT NULL,     -- 1: it has its row, and goes with that
    slot             INTEGER,              -- else with this process
    start            INTEGER,
    expires          INTEGER,              -- its deadline, monotonic microseconds
    hold             INTEGER,              -- of the client.run that it belongs to
    PRIMARY KEY (subscription_id, partition_id, txn_id, first),
    FOREIGN KEY (subscription_id, partition_id) REFERENCES cursors ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX pending_acks_by_transaction ON pending_acks (txn_id);
CREATE INDEX pending_acks_by_hold ON pending_acks (hold) WHERE hold IS NOT NULL;
CREATE TABLE leases (                      -- delivered, not deleted
    subscription_id  INTEGER NOT NULL,
    partition_id     INTEGER NOT NULL,
    message          INTEGER NOT NULL,     -- its offset
    first            INTEGER NOT NULL,     -- from here on there is no other message before it;
                                           -- below 0: -1 - the offset of its first piece, alone
    deliveries       INTEGER NOT NULL,
    slot             INTEGER,              -- of the process that has it; NULL: nobody
    start            INTEGER,
    consumer         INTEGER,
    until            INTEGER,              -- monotonic microseconds; NULL: an ack is pending
    PRIMARY KEY (subscription_id, partition_id, message),
    FOREIGN KEY (subscription_id, partition_id) REFERENCES cursors ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX leases_by_time ON leases (subscription_id, until);
CREATE TABLE returned_acks (               -- to be delivered again by an exclusive consumer
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription_id  INTEGER NOT NULL,
    partition_id     INTEGER NOT NULL,
    first            INTEGER NOT NULL,
    last             INTEGER NOT NULL,
    FOREIGN KEY (subscription_id, partition_id) REFERENCES cursors ON DELETE CASCADE
);
CREATE INDEX returned_by_subscription ON returned_acks (subscription_id);
"""
_STAGED = """
CREATE TABLE staged_sends (               -- what one session of a task's attempt has sent
    id       INTEGER PRIMARY KEY AUTOINCREMENT,   -- names the file, is never given again
    txn_id   INTEGER NOT NULL REFERENCES transactions ON DELETE CASCADE,
    job_id   TEXT    NOT NULL,
    attempt  TEXT    NOT NULL,            -- as of row sets: job and attempt
    bytes    INTEGER NOT NULL DEFAULT 0,  -- of the file that count
    boot     TEXT    NOT NULL             -- the file is not synced: another boot may not have it
);
CREATE INDEX staged_sends_by_transaction ON staged_sends (txn_id);
"""
UPGRADE_2_TO_3 = _CATALOG + _PRODUCERS + _SUBSCRIPTIONS
UPGRADE_3_TO_4 = _STAGED
SCHEMA = UPGRADE_2_TO_3 + UPGRADE_3_TO_4

BUFFERS: Final = get_args(Buffer)
CODECS: Final = get_args(Compression)
CLEANUPS: Final = get_args(Cleanup)
KIND: Final = payload.TOPIC
MAX_PARTITIONS: Final = 1024
_FOREVER: Final = 1e11  # seconds, whose microseconds are a timestamp
_AGES: Final = ("retention_seconds", "tombstone_seconds")


class TopicChanges(TypedDict, total=False):
    """Options of a topic that may be changed; those that are not named stay as they are."""

    compression: Compression | None
    retention_seconds: float | None
    retention_bytes: int | None
    retain_unacknowledged: bool
    cleanup: Cleanup
    tombstone_seconds: float


ValuesOf: TypeAlias = Callable[["TopicOptions"], Sequence[ValueStage]]
"""Gives the schemas of values that a topic is to have, by its options."""

CHANGEABLE: Final = tuple(TopicChanges.__annotations__)


@dataclass(frozen=True)
class TopicOptions:
    """The options of a topic: how it keeps what is sent to it.

    Attributes:
        compression: "lz4", "zstd" or None.
        retention_seconds: messages older than this may go; None keeps them.
        retention_bytes: of a partition; the oldest segments above it may go.
        segment_bytes, segment_seconds: when a segment is full or old, the next one begins.
        max_message_bytes: a larger message is sent in pieces.
        replica_of, replica_topic: ids of store and topic that it copies; nobody else writes to it.
        retain_unacknowledged: what a subscription has not acknowledged stays, whatever its age.
        value_schema: the columns of values; None: values are bytes.
        value_defaults: of these columns, as a `ValueStage` has them.
        former_values: the schemas before it, the first one first.
        altered: how often they were changed.
        cleanup: "compact": of the messages of a key the last one stays; "delete": all do.
        tombstone_seconds: so long a message without a value stays, by its timestamp, in "compact".
    """

    compression: str | None = None
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    segment_bytes: int = 64 << 20
    segment_seconds: float = 604800.0
    max_message_bytes: int = 1 << 20
    replica_of: str | None = None
    value_schema: pa.Schema | None = None
    replica_topic: int | None = None
    retain_unacknowledged: bool = False
    altered: int = 0
    cleanup: str = "delete"
    tombstone_seconds: float = 86400.0
    value_defaults: bytes | None = None
    former_values: tuple[ValueStage, ...] = ()

    def __post_init__(self) -> None:
        if self.compression not in (None, *CODECS):
            raise ValueError(f"compression is None, 'lz4' or 'zstd', not {self.compression!r}")
        if self.cleanup not in CLEANUPS:
            raise ValueError(f"cleanup is 'delete' or 'compact', not {self.cleanup!r}")
        for name in (*_AGES, "retention_bytes"):
            if (value := getattr(self, name)) is not None:
                require_number(name, value, name.rpartition("_")[2])
                if not value >= 0:
                    raise ValueError(f"{name} is None or at least 0, not {value!r}")
        if self.tombstone_seconds is None:
            raise ValueError("tombstone_seconds is a number, not None")
        for name in ("segment_bytes", "segment_seconds", "max_message_bytes"):
            require_number(name, value := getattr(self, name), name.rpartition("_")[2])
            if not value > 0:
                raise ValueError(f"{name} is above 0, not {value!r}")
        for name in (*_AGES, "segment_seconds"):
            if (getattr(self, name) or 0) > _FOREVER:
                object.__setattr__(self, name, _FOREVER)
        for name in ("retention_bytes", "segment_bytes", "max_message_bytes"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(min(value, 1 << 62)))
        if not isinstance(kept := self.retain_unacknowledged, bool):
            raise ValueError(f"retain_unacknowledged is True or False, not {kept!r}")
        if self.value_schema is not None:
            values.require_declarable(self.value_schema)

    @CachedProperty
    def codec(self) -> ValueCodec | None:
        """Encodes and decodes values; None where they are bytes."""
        return value_codec(*self.values) if self.values else None

    @property
    def values(self) -> tuple[ValueStage, ...]:
        """All schemas of values, the last one last; none where values are bytes."""
        if self.value_schema is None:
            return ()
        return (*self.former_values, ValueStage(self.value_schema, self.value_defaults))

    def with_values(self, stages: Sequence[ValueStage]) -> TopicOptions:
        """The same with these schemas of values."""
        if len(stages) > values.MOST_SCHEMAS:
            raise NotSupportedError("a topic has had too many value schemas: make another topic")
        *former, (schema, defaults) = stages or [ValueStage(None)]
        return replace(
            self, value_schema=schema, value_defaults=defaults, former_values=tuple(former)
        )

    @property
    def changeable(self) -> TopicChanges:
        """Those that may be changed."""
        return {name: getattr(self, name) for name in CHANGEABLE}  # type: ignore[return-value]

    def to_json(self) -> str:
        """Return the options as the catalog keeps them."""
        document: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("value_schema", "value_defaults", "former_values"):
            del document[name]
        if self.values:
            document["value_schema"] = values.to_document(self.values)
        return json.dumps(document, default=float)

    @classmethod
    def from_json(cls, text: str) -> TopicOptions:
        document = json.loads(text)
        document |= {name: 0 for name in _AGES if document.get(name) is False}  # as it was let pass
        declared = document.pop("value_schema", None)
        return cls(**document).with_values(values.from_document(declared) if declared else ())


@dataclass(frozen=True)
class TopicInfo:
    """A topic as the catalog has it.

    Attributes:
        buffer: where batches of open transactions wait, "marker" or "sidecar".
        partitions: ids by partition number.
    """

    id: int
    name: str
    buffer: str
    options: TopicOptions
    partitions: tuple[int, ...]

    def require_alike(self, partitions: int, buffer: str, options: TopicOptions) -> None:
        """Refuse a topic that was made otherwise.

        Raises:
            TopicExistsError: it was; the message names each difference.
        """
        asked = {"partitions": partitions, "buffer": buffer, **_by_name(options)}
        here = {"partitions": len(self.partitions), "buffer": self.buffer, **_by_name(self.options)}
        found = [
            f"its {name} is {here[name]!r}, not {asked[name]!r}"
            for name in asked
            if here[name] != asked[name]
        ]
        if found:
            raise TopicExistsError(
                f"there is a topic {self.name!r} already, and it is another one: "
                f"{'; '.join(found)}. Take another name, or use it as it is: "
                f"client.topic({self.name!r})"
            )


def _by_name(options: TopicOptions) -> dict[str, Any]:
    """The options, with the columns of values as people write them."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    for name in ("altered", "value_defaults", "former_values"):
        del values[name]
    return values | {"value_schema": options.codec and options.codec.described}


def create(
    cur: apsw.Cursor, name: str, partitions: int, buffer: str, options: TopicOptions
) -> TopicInfo:
    """Add a topic with its partitions.

    Raises:
        TopicExistsError: the name is taken.
        ValueError: the number of partitions or the buffer makes no sense.
        NotSupportedError: key compaction of a topic with buffer="sidecar".
    """
    partitions = _count(partitions)
    if buffer not in BUFFERS:
        raise ValueError(f"buffer is 'marker' or 'sidecar', not {buffer!r}")
    _require_compactable(buffer, options)
    if find(cur, name) is not None:
        raise TopicExistsError(
            f"there is a topic {name!r} already: take another name, or pass exists_ok=True"
        )
    cur.execute(
        "INSERT INTO topics (name, buffer, options) VALUES (?, ?, ?)",
        (name, buffer, options.to_json()),
    )
    topic_id = cur.connection.last_insert_rowid()
    bump(cur)
    _add_partitions(cur, topic_id, range(partitions))
    return get(cur, name)


def _require_compactable(buffer: str, options: TopicOptions) -> None:
    """Refuse key compaction where messages wait beside the log.

    Raises:
        NotSupportedError: it is so.
    """
    if options.cleanup == "compact" and buffer != "marker":
        raise NotSupportedError(
            "cleanup='compact' is for topics with buffer='marker': the side log of a "
            "transaction goes into the log as it was sent"
        )


def _add_partitions(cur: apsw.Cursor, topic_id: int, numbers: range) -> None:
    row = "INSERT INTO partitions (topic_id, number) VALUES (?, ?)"
    cur.executemany(row, [(topic_id, number) for number in numbers])


def _count(partitions: int) -> int:
    whole = hasattr(partitions, "__index__") and partitions is not True
    if whole and 1 <= partitions <= MAX_PARTITIONS:
        return int(partitions)
    raise ValueError(f"a topic has 1 to {MAX_PARTITIONS} partitions, not {partitions!r}")


def alter(
    cur: apsw.Cursor,
    topic: TopicInfo,
    changes: Mapping[str, Any],
    partitions: int | None = None,
    values_of: ValuesOf | None = None,
) -> TopicInfo:
    """Give a topic other options, more partitions, or another schema of values.

    Args:
        values_of: gives the schemas of values by the options as they are.

    Raises:
        TopicNotFoundError: it was dropped.
        TypeError: there is no such option, or it stays as it was made.
        ValueError: one makes no sense, or the topic has more partitions.
        SchemaError: of `values_of`.
        NotSupportedError: key compaction of a topic with buffer="sidecar".
    """
    if unknown := sorted(changes.keys() - set(CHANGEABLE)):
        raise TypeError(
            f"of a topic {', '.join(CHANGEABLE)} can be changed, not {', '.join(unknown)}"
        )
    require_live(cur, topic)
    present = get(cur, topic.name)
    options = replace(present.options, **changes)
    if values_of is not None:
        options = options.with_values(values_of(present.options))
    _require_compactable(present.buffer, options)
    there = len(present.partitions)
    partitions = there if partitions is None else _count(partitions)
    if partitions < there:
        raise ValueError(
            f"topic {topic.name!r} has {there} partitions: it can have more, not {partitions}. "
            "What its last ones hold would be lost; make another topic, and send there"
        )
    if options == present.options and partitions == there:
        return present
    options = replace(options, altered=options.altered + 1)
    cur.execute("UPDATE topics SET options = ? WHERE id = ?", (options.to_json(), topic.id))
    _add_partitions(cur, topic.id, range(there, partitions))
    bump(cur)
    return get(cur, topic.name)


def declare_values(directory: StoreDirectory, options: TopicOptions) -> None:
    """Have FORMAT say that a topic has values that versions of before do not know; status.db is
    locked.
    """
    if options.former_values or options.value_defaults is not None:
        directory.add_feature(VALUE_SCHEMAS)


def drop(cur: apsw.Cursor, topic: TopicInfo) -> None:
    """Take a topic out of the catalog; its files are removed later."""
    cur.execute("UPDATE topics SET dropped_ts = ? WHERE id = ?", (next_timestamp(cur), topic.id))
    bump(cur)


def bump(cur: apsw.Cursor) -> None:
    """A new catalog version: what is remembered of the catalog is to be read again."""
    cur.execute("UPDATE clock_row SET catalog_version = catalog_version + 1")


def find(cur: apsw.Cursor, name: str) -> TopicInfo | None:
    errors.require_text("a topic's name", name)
    query = "SELECT id, name, buffer, options FROM topics WHERE name = ? AND dropped_ts IS NULL"
    found = cur.execute(query, (name,)).fetchone()
    return None if found is None else _info(cur, *found)


def by_partition(cur: apsw.Cursor, partition_id: int) -> TopicInfo | None:
    """The topic of a partition, also when it is dropped but not yet purged."""
    found = cur.execute(
        "SELECT topics.id, name, buffer, options FROM topics JOIN partitions "
        "ON topic_id = topics.id WHERE partitions.id = ?",
        (partition_id,),
    ).fetchone()
    return None if found is None else _info(cur, *found)


def _info(cur: apsw.Cursor, topic_id: int, name: str, buffer: str, options: str) -> TopicInfo:
    found = cur.execute("SELECT id FROM partitions WHERE topic_id = ? ORDER BY number", (topic_id,))
    partitions = tuple(id for (id,) in found)
    return TopicInfo(topic_id, name, buffer, TopicOptions.from_json(options), partitions)


def get(cur: apsw.Cursor, name: str) -> TopicInfo:
    """The topic of this name.

    Raises:
        TopicNotFoundError: there is none.
    """
    found = find(cur, name)
    if found is None:
        others = ", ".join(names(cur)) or "none"
        raise TopicNotFoundError(
            f"there is no topic {name!r}; the topics are: {others}. "
            "Make it with client.create_topic(...)"
        )
    return found


def names(cur: apsw.Cursor) -> list[str]:
    return [
        name
        for (name,) in cur.execute("SELECT name FROM topics WHERE dropped_ts IS NULL ORDER BY name")
    ]


def live(cur: apsw.Cursor) -> dict[int, int]:
    """Ids of the topics that are not dropped, and how often each was altered."""
    return dict(
        cur.execute(
            "SELECT id, coalesce(json_extract(options, '$.altered'), 0) FROM topics "
            "WHERE dropped_ts IS NULL"
        )
    )


def live_partitions(cur: apsw.Cursor) -> set[int]:
    """Ids of the partitions of topics that are not dropped."""
    return {
        id
        for (id,) in cur.execute(
            "SELECT partitions.id FROM partitions JOIN topics ON topic_id = topics.id "
            "WHERE dropped_ts IS NULL"
        )
    }


def partition_ids(cur: apsw.Cursor) -> set[int]:
    """Ids of all partitions, those of dropped topics too."""
    return {id for (id,) in cur.execute("SELECT id FROM partitions")}


def dropped_before(cur: apsw.Cursor, snapshot: int | None) -> list[TopicInfo]:
    """The topics that were dropped, and that no snapshot from this one on has; None for none."""
    found: list[Any] = cur.execute(
        "SELECT id, name, buffer, options FROM topics "
        "WHERE dropped_ts < coalesce(?, dropped_ts + 1)",
        (snapshot,),
    ).fetchall()
    return [_info(cur, *each) for each in found]


def sidecar_partitions(cur: apsw.Cursor) -> list[int]:
    """Ids of live partitions with side logs."""
    found = cur.execute(
        "SELECT partitions.id FROM partitions JOIN topics ON topic_id = topics.id "
        "WHERE dropped_ts IS NULL AND buffer = 'sidecar'"
    )
    return [id for (id,) in found]


def require_live(cur: apsw.Cursor, topic: TopicInfo) -> None:
    """Refuse a topic that was dropped.

    Raises:
        TopicNotFoundError: it was.
    """
    found = cur.execute(
        "SELECT 1 FROM topics WHERE id = ? AND dropped_ts IS NULL", (topic.id,)
    ).fetchone()
    if found is None:
        raise dropped(topic)


def require_writable(topic: TopicInfo, what: str = "send to") -> None:
    """Refuse a topic that is a copy.

    Raises:
        NotSupportedError: it is copied from another store.
    """
    if topic.options.replica_of is not None:
        raise NotSupportedError(
            f"{what} topic {topic.name!r}: it is a copy of a topic of store "
            f"{topic.options.replica_of}, and only what is done there comes to it"
        )


def dropped(topic: TopicInfo) -> TopicNotFoundError:
    return TopicNotFoundError(
        f"topic {topic.name!r} was dropped: this handle is of no use any more. If the name was "
        "given again, ask client.topic(...) for a new handle"
    )


# -- offsets ---------------------------------------------------------------------------


def take_offsets(cur: apsw.Cursor, partition_id: int, count: int) -> int:
    """The first of `count` offsets of a partition that nobody else gets."""
    (following,) = one(
        cur,
        "UPDATE partitions SET next_offset = next_offset + ? WHERE id = ? RETURNING next_offset",
        (count, partition_id),
    )
    return int(following) - count


def next_offset(cur: apsw.Cursor, partition_id: int) -> int:
    """Return the offset that is given next; 0 for a partition that is gone."""
    found = cur.execute(
        "SELECT next_offset FROM partitions WHERE id = ?", (partition_id,)
    ).fetchone()
    return 0 if found is None else int(found[0])
