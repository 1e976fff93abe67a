"""Members of consumer groups, as rows of a table, each alive while its lease is.

A member's lease is a transaction that writes nothing. It has heartbeats, so that it ends a
keepalive time after its process does; and a timeout, so that a member that does not say for so long
that it is there is out. It is replaced before half of that is over, and so keeps no history for
longer.

Who finds the lease of a row ended deletes the row, if it is as it was found. A number is never
given again: who was out for a while comes back as another member.

A server for Kafka's clients keeps its members itself (`txnkv.kafka`), and refuses those of a group
that has members here.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol

from txnkv.client.attempts import require_own
from txnkv.client.table import Table
from txnkv.coordinator import TxnId, TxnState
from txnkv.errors import (
    InvalidTxnStateError,
    TableNotFoundError,
    TxnkvError,
    TxnNotFoundError,
)
from txnkv.storage import SharedWeakSet, clock
from txnkv.tables import Schema
from txnkv.topics import TopicInfo
from txnkv.transaction import Closing, Transaction

MEMBERS_TABLE: Final = "group_members"
OFFSETS_TABLE: Final = "kafka_offsets"
LATEST_NOTE: Final = re.compile("latest of ([0-9]+)")
"""The metadata of a group's first positions, where it began at the latest of so many partitions."""
_MEMBERS: Final = Schema(
    {
        "group": "string",
        "topic": "string",
        "member": "int64",
        "lease": "string",
        "process": "string",
        "joined": "timestamp[us, tz=UTC]",
    },
    primary_key=["group", "topic", "member"],
)
_OFFSETS: Final = Schema(
    {
        "group": "string",
        "topic": "string",
        "partition": "int32",
        "offset": "int64",
        "metadata": "string?",
        "committed": "timestamp[us, tz=UTC]",
        "member": "int64?",
        "leader_epoch": "int32?",
    },
    primary_key=["group", "topic", "partition"],
)

Row = dict[str, Any]


class GroupClient(Protocol):
    """A `Client`, as far as groups need it."""

    def create_table(self, name: str, schema: Schema, *, evolve: bool) -> Table:
        """See `Client.create_table`."""

    def table(self, name: str) -> Table:
        """See `Client.table`."""

    def topic_info(self, topic: str) -> TopicInfo:
        """See `Client.topic_info`."""

    def new_transaction(self, timeout: float | None) -> Transaction:
        """See `Client.new_transaction`."""

    def run(self, fn: Callable[[Transaction], Any], *, deadline: float = ...) -> Any:
        """See `Client.run`."""

    def transaction_state(self, id: int) -> TxnState:
        """See `Client.transaction_state`."""

    @property
    def handles(self) -> SharedWeakSet[Closing]:
        """Those that it closes at its end."""

    @property
    def keepalive_time(self) -> float:
        """Seconds without heartbeats after which a transaction ends."""


def _found(client: GroupClient, name: str, schema: Schema) -> Table:
    """Return a table of groups.

    Raises:
        TableNotFoundError: there is none.
        SchemaError: it is a program's own.
    """
    return require_own(client.table(name), schema, "consumer groups")


def offsets_table(client: GroupClient) -> Table:
    """Return the table of positions; it is made at its first use.

    Raises:
        SchemaError: a program has one of its own of this name.
    """
    with suppress(TableNotFoundError):
        found = _found(client, OFFSETS_TABLE, _OFFSETS)
        if {*_OFFSETS.names} <= {*found.schema.names}:
            return found
    return client.create_table(OFFSETS_TABLE, _OFFSETS, evolve=True)


def forget_groups(client: GroupClient, topic: str) -> None:
    """Delete the members and positions of all groups in a topic that is dropped, or is about to be
    made: one that has the name of another has none of its offsets, and none of its readers.
    """
    for name, schema in ((MEMBERS_TABLE, _MEMBERS), (OFFSETS_TABLE, _OFFSETS)):
        with suppress(TableNotFoundError):
            table = client.table(name)
            if table.schema.primary_key != schema.primary_key:  # a program's own
                continue
            if table.count(where=[("topic", "=", topic)]):
                client.run(partial(_delete_rows, table, topic))


def _delete_rows(table: Table, topic: str, txn: Transaction) -> None:
    key = table.schema.primary_key
    for row in txn.scan(table, key, where=[("topic", "=", topic)]):
        txn.delete(table, tuple(row[each] for each in key))


def members_table(client: GroupClient) -> Table:
    """Return the table of members; it is made at its first use. Raises as `offsets_table`."""
    with suppress(TableNotFoundError):
        return _found(client, MEMBERS_TABLE, _MEMBERS)
    return client.create_table(MEMBERS_TABLE, _MEMBERS, evolve=True)


def key_of(row: Row) -> tuple[str, str, int]:
    """The key of a member's row."""
    return row["group"], row["topic"], row["member"]


class Membership:
    """A member's row and lease.

    Args:
        client: of the store.
        group: its name.
        topic: what it reads.
        seconds: a member that does not `renew` for so long is out.

    Attributes:
        number: of the member.
    """

    def __init__(self, client: GroupClient, group: str, topic: str, seconds: float) -> None:
        self._client = client
        self._group, self._topic, self._seconds = group, topic, seconds
        self._table = members_table(client)
        self._lease: Transaction | None = None
        self._renewed = 0
        self.number = -1

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its row."""
        return self._group, self._topic, self.number

    @property
    def lasts(self) -> bool:
        """Tell whether it has a lease, which may be over."""
        return self._lease is not None

    def _begin_lease(self) -> Transaction:
        lease = self._client.new_transaction(timeout=self._seconds)
        lease.serialize()  # so that others know of it
        return lease

    def join(self) -> None:
        """Be a member, under a new number."""
        self.end()
        lease = self._begin_lease()
        number = self._table.next_id()
        process = f"{platform.node()}:{os.getpid()}"
        own = (self._group, self._topic, number, str(int(lease.id)), process, datetime.now(UTC))

        try:
            self._client.run(lambda txn: txn.insert(self._table, own))
        except BaseException:
            lease.rollback()
            raise
        self._lease, self.number = lease, number
        self._renewed = clock.monotonic_micros()

    def renew(self) -> bool:
        """Say that it is there; False: it was taken for dead, or has left."""
        if not self.lasts:
            return False
        now = clock.monotonic_micros()
        if now - self._renewed < self._seconds * 1e6 / 2:
            return True
        lease = self._begin_lease()

        def change(txn: Transaction) -> bool:
            row = txn.get(self._table, self.key)
            if row is None or not has_lease(self._client, row):
                return False
            txn.upsert(self._table, {**row, "lease": str(int(lease.id))})
            return True

        try:
            renewed: bool = self._client.run(change)
        except BaseException:
            lease.rollback()
            raise
        if not renewed:
            lease.rollback()
            return False
        self.end()
        self._lease, self._renewed = lease, now
        return True

    def live(self, txn: Transaction) -> list[int]:
        """The numbers of the live members of its group and topic, as they came; in a transaction
        that deletes the rows of others.
        """
        where = [("group", "=", self._group), ("topic", "=", self._topic)]
        return [row["member"] for row in _live(self._client, self._table, where, txn)]

    def leave(self, txn: Transaction) -> None:
        """Be no member any more, with a transaction; then `end` the lease."""
        txn.delete_ignore(self._table, self.key)

    def end(self) -> None:
        """End the lease: whoever looks takes it for dead."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(TxnkvError):  # it has ended, or ends by itself
                lease.rollback()


def live_members(
    client: GroupClient, group: str, topic: str | None = None, txn: Transaction | None = None
) -> list[Row]:
    """The rows of a group's live members, as they came; of all topics without one. Raises as
    `offsets_table`.

    Args:
        txn: deletes the rows of others: it conflicts with a renewal behind this look.
    """
    try:
        table = _found(client, MEMBERS_TABLE, _MEMBERS)
    except TableNotFoundError:
        return []
    where = [("group", "=", group)] + ([("topic", "=", topic)] if topic is not None else [])
    return _live(client, table, where, txn)


def _live(client: GroupClient, table: Table, where: Any, txn: Transaction | None) -> list[Row]:
    rows = []
    for row in table.scan(where=where) if txn is None else txn.scan(table, where=where):
        if has_lease(client, row):
            rows.append(row)
        elif txn is not None:
            txn.delete(table, key_of(row))
    return sorted(rows, key=lambda row: (row["joined"], row["member"]))


def has_lease(client: GroupClient, row: Row) -> bool:
    """Tell whether a member's lease is open."""
    try:
        return client.transaction_state(TxnId(int(row["lease"]))) is TxnState.OPEN
    except (TxnNotFoundError, InvalidTxnStateError):  # of before a restore, too
        return False
