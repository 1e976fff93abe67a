"""The catalog of tables in status.db. Changes take effect at once, outside of transactions.

A table that is altered gets its new schema at a timestamp, as if by a commit: snapshots from there
on have it, older ones keep the schema that they had. So the commit timestamp of a row says which
schema it was written with, wherever the row is kept as bytes: in memory, and in the commit log.

    schemas    id, a           since 0
               id, a, b        since 20
    rows       (1, x) at 10    is bytes of the first, (2, y, z) at 30 of the second

A small commit is refused inside its SQLite transaction if the schema that it wrote with is not
the present one any more, and the change is a transaction of the same database.

An index is a table too, a hidden one: its name begins with a character that no other's does, and
who asks for names does not get it. The schema of the indexed table names it, so that it is known of
each snapshot whether it had the index, and whether that was ready to be read.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import apsw

from txnkv.coordinator import MAX_TIMESTAMP, Timestamp, next_timestamp, one, payload, reach
from txnkv.core import require_zones
from txnkv.errors import (
    CorruptionError,
    SchemaChangedError,
    TableExistsError,
    TableNotFoundError,
    TxnkvError,
    require_text,
)
from txnkv.tables import table_history
from txnkv.tables.partitioning import Partitioning
from txnkv.tables.schema import IndexInfo, Schema
from txnkv.tables.schema_change import DatedSchema, dated_schemas, tightened, whole

KIND: Final = payload.TABLET

_HIDDEN: Final = "\x1f"
"""Names of hidden tables begin so; behind it stands the id of the table that an index is of."""


_BEGINNING: Final = Timestamp(0)


@dataclass(frozen=True)
class TableInfo:
    """A table as the catalog has it, or had it at some time.

    Attributes:
        tablets: ids by tablet number.
        since: when it got this schema.
        older: the schemas that it had before, the first one first.
        index_of: id of the table that it is an index of.
    """

    id: int
    name: str
    schema: Schema
    partitioning: Partitioning
    tablets: tuple[int, ...]
    since: Timestamp = _BEGINNING
    older: tuple[DatedSchema, ...] = ()
    index_of: int | None = None

    @property
    def history_id(self) -> int:
        """The id of the table whose history it has: an index has that of what it is of."""
        return self.id if self.index_of is None else self.index_of

    def at(self, snapshot: int) -> TableInfo:
        """The table as this snapshot has it; it knows no later schemas."""
        if snapshot >= self.since:
            return self
        found = max(bisect_right(self.older, snapshot, key=lambda each: each.since) - 1, 0)
        then = self.older[found]
        return replace(self, schema=then.schema, since=then.since, older=self.older[:found])

    def whole(self, floor: int) -> TableInfo:
        """The table with every column that some snapshot from `floor` on has."""
        ends = [*(each.since for each in self.older[1:]), self.since]
        seen = [each.schema for each, end in zip(self.older, ends, strict=False) if end > floor]
        if not seen:
            return self
        schema = whole([*seen, self.schema])
        every = (*self.older, DatedSchema(self.since, self.schema.to_json()))
        return replace(self, schema=schema, since=Timestamp(MAX_TIMESTAMP), older=every)

    def require_alike(self, schema: Schema, partitioning: Partitioning) -> None:
        """Refuse a table that was made otherwise.

        Raises:
            TableExistsError: it was; the message names each difference.
        """
        found = self.schema.differences(schema)
        if not found and not self.partitioning.same_as(partitioning):
            found.append(f"it is partitioned by {self.partitioning}, not by {partitioning}")
        if found:
            raise TableExistsError(
                f"there is a table {self.name!r} already, and it is another one: "
                f"{'; '.join(found)}. Take another name, or use it as it is: "
                f"client.table({self.name!r})"
            )


def create(cur: apsw.Cursor, name: str, schema: Schema, partitioning: Partitioning) -> TableInfo:
    """Add a table with its tablets.

    Raises:
        SchemaError: a column has a time zone that is none.
        TableExistsError: the name is taken.
        ValueError: it is one of those of hidden tables.
    """
    require_plain(name)
    require_zones(schema.arrow)
    if find(cur, name) is not None:
        raise TableExistsError(
            f"there is a table {name!r} already: take another name, or pass exists_ok=True"
        )
    return _known(by_id(cur, _insert(cur, name, schema, partitioning)))


def require_plain(name: str) -> None:
    """Refuse a name that only hidden tables have.

    Raises:
        ValueError: it is one.
    """
    if name.startswith(_HIDDEN):
        raise ValueError(f"a table's name does not begin with {_HIDDEN!r}, as {name!r} does")


def _insert(cur: apsw.Cursor, name: str, schema: Schema, partitioning: Partitioning) -> int:
    cur.execute(
        "INSERT INTO tables (name, schema, partitioning) VALUES (?, ?, ?)",
        (name, schema.with_indexes(()).to_json(), partitioning.to_json()),
    )
    table_id = cur.connection.last_insert_rowid()
    bump(cur)
    cur.executemany(
        "INSERT INTO tablets (table_id, number) VALUES (?, ?)",
        [(table_id, number) for number in range(partitioning.tablets)],
    )
    return table_id


def create_hidden(cur: apsw.Cursor, table: TableInfo, schema: Schema) -> int:
    """Add the hidden table of an index; return its id.

    Args:
        cur: of a write.
        table: that is indexed.
        schema: of the entries.
    """
    columns = ", ".join(schema.primary_key)
    (last,) = one(cur, "SELECT seq FROM sqlite_sequence WHERE name = 'tables'")
    name = f"{_HIDDEN}{table.id}{_HIDDEN}{columns}{_HIDDEN}{last + 1}"  # no other ever has it
    return _insert(cur, name, schema, Partitioning.of(schema, None))


def drop_hidden(cur: apsw.Cursor, indexes: Sequence[IndexInfo], dropped_ts: int | None) -> None:
    """Drop the tables of indexes, or recall them with None."""
    cur.executemany(
        "UPDATE tables SET dropped_ts = ? WHERE id = ?",
        [(dropped_ts, index.table) for index in indexes],
    )


def alter(
    cur: apsw.Cursor,
    table: TableInfo,
    change: Callable[[TableInfo], Schema],
    name: str | None = None,
) -> TableInfo:
    """Give a table another schema, or another name, from a new timestamp on, which is the latest
    snapshot then. With another name it is altered too: what is known of it is read again.

    Args:
        cur: of a write.
        table: as it was.
        change: returns the new schema for the table as it is; what it raises, nothing changed.
        name: a new name.

    Raises:
        TableNotFoundError: it was dropped.
        TableExistsError: the new name is taken.
    """
    present = by_id(cur, table.id)
    if present is None:
        raise dropped(table)
    changed = change(present)
    require_zones([each for each in changed.arrow if each.name not in present.schema.columns])
    schema = changed.to_json()
    name = present.name if name is None else name
    require_plain(name)
    before = present.schema.to_json()
    if (schema, name) == (before, present.name):
        return present
    if name != present.name and find(cur, name) is not None:
        raise TableExistsError(
            f"there is a table {name!r} already: take another name for {present.name!r}, or drop "
            "that one"
        )
    now = next_timestamp(cur)
    every = (*present.older, DatedSchema(present.since, before))
    ends = [*(each.since for each in every[1:]), now]
    floor = _needed_from(cur, present)
    older = [
        {"since": former.since, "schema": former.text}
        for former, end in zip(every, ends, strict=True)
        if end > floor
    ]
    cur.execute(
        "UPDATE tables SET name = ?, schema = ?, schema_since = ?, older_schemas = ? WHERE id = ?",
        (name, schema, now, json.dumps(older), table.id),
    )
    reach(cur, now)
    bump(cur)
    return _known(by_id(cur, table.id))


def _needed_from(cur: apsw.Cursor, table: TableInfo) -> int:
    """No snapshot below is read, and every row that was written before is in row sets."""
    floor, oldest, held = one(
        cur,
        "SELECT history_floor, (SELECT min(commit_ts) FROM commit_log "
        "WHERE commit_ts > flushed_ts), (SELECT min(commit_ts) FROM held_sections) FROM clock",
    )
    own = table_history.of_table(cur, table.history_id)
    floor = floor if own is None else own.floor
    return int(min(stamp for stamp in (floor, oldest, held) if stamp is not None))


def drop(cur: apsw.Cursor, table: TableInfo, keep: float = 0) -> None:
    """Take a table out of the catalog; its files stay while a snapshot may read them.

    Args:
        keep: seconds for which it can be recalled: until then `dropped_ts` is the negative of
            the time when they are over, and all of the table is looked after as before.
    """
    now = next_timestamp(cur)
    dropped_ts = -Timestamp.from_micros(now.micros + int(keep * 1e6)) if keep else now
    cur.execute("UPDATE tables SET dropped_ts = ? WHERE id = ?", (dropped_ts, table.id))
    drop_hidden(cur, table.schema.indexes, dropped_ts)
    bump(cur)


def recall(cur: apsw.Cursor, name: str) -> TableInfo:
    """Bring a kept table back, of several of one name the one that was made last.

    Raises:
        TableNotFoundError: none of this name is kept.
        TableExistsError: the name was given to another meanwhile.
    """
    kept = dict(
        cur.execute(f"SELECT name, id FROM tables WHERE dropped_ts < 0 AND {_SHOWN} ORDER BY id")
    )
    if name not in kept:
        others = ", ".join(sorted(kept)) or "none"
        raise TableNotFoundError(
            f"no dropped table {name!r} is kept; kept are: {others}. drop_table(name, "
            "keep=seconds) keeps one for so long"
        )
    if find(cur, name) is not None:
        raise TableExistsError(
            f"the name {name!r} was given to another table: drop that one before the dropped one "
            "is recalled, with keep=seconds if it is wanted again"
        )
    cur.execute("UPDATE tables SET dropped_ts = NULL WHERE id = ?", (kept[name],))
    found = get(cur, name)
    drop_hidden(cur, found.schema.indexes, None)
    bump(cur)
    return found


def kept_until(cur: apsw.Cursor) -> Timestamp | None:
    """When the next kept table can be recalled no more; None when none is kept."""
    (least,) = one(cur, "SELECT max(dropped_ts) FROM tables WHERE dropped_ts < 0")
    return None if least is None else Timestamp(-least)


def let_go(cur: apsw.Cursor, now: Timestamp) -> None:
    """Drop for good what is not to be kept any longer."""
    cur.execute(
        "UPDATE tables SET dropped_ts = ? WHERE dropped_ts BETWEEN ? AND -1",
        (next_timestamp(cur), -now),
    )


def bump(cur: apsw.Cursor) -> None:
    """A new catalog version: what is remembered of the catalog is to be read again."""
    cur.execute("UPDATE clock_row SET catalog_version = catalog_version + 1")


def find(cur: apsw.Cursor, name: str) -> TableInfo | None:
    require_text("a table's name", name)
    found = cur.execute(
        f"SELECT {_COLUMNS} FROM tables WHERE name = ? AND dropped_ts IS NULL AND {_SHOWN}", (name,)
    ).fetchone()
    return None if found is None else _info(cur, *found)


def by_id(cur: apsw.Cursor, id: int) -> TableInfo | None:
    """Return the table of this id; None when it was dropped."""
    found = cur.execute(
        f"SELECT {_COLUMNS} FROM tables WHERE id = ? AND dropped_ts IS NULL", (id,)
    ).fetchone()
    return None if found is None else _info(cur, *found)


def by_tablet(cur: apsw.Cursor, tablet_id: int) -> TableInfo | None:
    """The table of a tablet, also when it is dropped but not yet purged."""
    found = cur.execute(
        f"SELECT {_COLUMNS} FROM tables JOIN tablets ON table_id = tables.id WHERE tablets.id = ?",
        (tablet_id,),
    ).fetchone()
    return None if found is None else _info(cur, *found)


_COLUMNS: Final = "tables.id, name, schema, partitioning, schema_since, older_schemas"

_SHOWN: Final = "substr(name, 1, 1) != char(31)"
"""It is no hidden table."""


def _info(
    cur: apsw.Cursor,
    table_id: int,
    name: str,
    schema_text: str,
    partitioning_text: str,
    since: int,
    older_text: str,
) -> TableInfo:
    schema = Schema.from_json(schema_text)
    tablets = tuple(
        id
        for (id,) in cur.execute(
            "SELECT id FROM tablets WHERE table_id = ? ORDER BY number", (table_id,)
        )
    )
    if not tablets:
        raise CorruptionError(f"status.db: table {name!r} has no tablets. Restore a backup")
    partitioning = Partitioning.from_json(schema, partitioning_text)
    index_of = None
    if name.startswith(_HIDDEN):
        index_of, name = _of_index(cur, name)
    return TableInfo(
        table_id,
        name,
        schema,
        partitioning,
        tablets,
        Timestamp(since),
        dated_schemas(older_text),
        index_of,
    )


def _of_index(cur: apsw.Cursor, name: str) -> tuple[int, str]:
    """The table that a hidden one is an index of, and what messages call it."""
    _, table_id, columns, _ = name.split(_HIDDEN)
    of: Any = cur.execute("SELECT name FROM tables WHERE id = ?", (int(table_id),)).fetchone()
    return int(table_id), f"{'?' if of is None else of[0]} (index by {columns})"


def _known(found: TableInfo | None) -> TableInfo:
    assert found is not None
    return found


def get(cur: apsw.Cursor, name: str) -> TableInfo:
    """The table of this name.

    Raises:
        TableNotFoundError: there is none.
    """
    found = find(cur, name)
    if found is None:
        others = ", ".join(names(cur)) or "none"
        raise TableNotFoundError(
            f"there is no table {name!r}; the tables are: {others}. "
            "Make it with client.create_table(...)"
        )
    return found


def names(cur: apsw.Cursor) -> list[str]:
    return [
        name
        for (name,) in cur.execute(
            f"SELECT name FROM tables WHERE dropped_ts IS NULL AND {_SHOWN} ORDER BY name"
        )
    ]


def live(cur: apsw.Cursor) -> dict[int, int]:
    """Ids of the tables that are not dropped, and since when each has its schema."""
    return dict(cur.execute("SELECT id, schema_since FROM tables WHERE dropped_ts IS NULL"))


def require_live(cur: apsw.Cursor, table: TableInfo) -> None:
    """Refuse a table that was dropped.

    Raises:
        TableNotFoundError: it was.
    """
    if table.id not in live(cur):
        raise dropped(table)


def is_dropped(cur: apsw.Cursor, table: TableInfo) -> bool:
    """Tell whether a table was dropped, as one that can be recalled is, too."""
    look = "SELECT 1 FROM tables WHERE id = ? AND dropped_ts IS NULL"
    return cur.execute(look, (table.id,)).get is None


def require_unchanged(cur: apsw.Cursor, table: TableInfo) -> None:
    """Refuse a table that was dropped, or has another schema by now.

    Raises:
        TableNotFoundError: it was dropped.
        SchemaChangedError: it was altered.
    """
    found = cur.execute(
        "SELECT schema_since FROM tables WHERE id = ? AND dropped_ts IS NULL", (table.id,)
    ).fetchone()
    if found is None:
        raise dropped(table)
    if found[0] != table.since:
        raise changed(table)


def refuse_tightened(cur: apsw.Cursor, tablet_ids: Sequence[int], snapshot: int) -> None:
    """Refuse what was staged at a snapshot for a column that may not be null any more, or for other
    indexes than the table has now.

    Raises:
        SchemaChangedError: there may be nulls in what was staged, or an index lacks it.
    """
    later: list[Any] = cur.execute(
        "SELECT DISTINCT tables.id FROM json_each(?) JOIN tablets ON tablets.id = value "
        "JOIN tables ON tables.id = table_id WHERE schema_since > ?",
        (json.dumps(list(tablet_ids)), snapshot),
    ).fetchall()
    for (id,) in later:
        table = by_id(cur, id)
        if table is None:
            continue
        then, now = table.at(snapshot).schema, table.schema
        if tightened(then, now) or written_indexes(then) != written_indexes(now):
            raise changed(table)


def written_indexes(schema: Schema) -> set[int]:
    """The hidden tables that who writes with a schema keeps in step."""
    return {index.table for index in schema.indexes}


def changed(table: TableInfo) -> SchemaChangedError:
    """Return the error for rows that were made for a schema which the table has no more."""
    return SchemaChangedError(
        f"table {table.name!r} was altered, or dropped, since this transaction began: what it "
        "wrote there was made for the columns of before, or it read what is gone, as an index. Run "
        "it again"
    )


def dropped(table: TableInfo) -> TxnkvError:
    """Return the error for a table that was dropped; of an index, that its table was altered."""
    if table.index_of is not None:
        return changed(table)
    return TableNotFoundError(
        f"table {table.name!r} was dropped: this handle is of no use any more. If the name was "
        "given again, ask client.table(...) for a new handle"
    )


def reserve_row_ids(cur: apsw.Cursor, table: TableInfo, count: int) -> int:
    """The first of `count` ids that nobody else gets."""
    require_live(cur, table)
    (following,) = one(
        cur,
        "UPDATE tables SET next_row_id = next_row_id + ? WHERE id = ? RETURNING next_row_id",
        (count, table.id),
    )
    return int(following) - count


def live_tablets(cur: apsw.Cursor) -> set[int]:
    """Ids of the tablets of tables that were not dropped, or can be recalled: what others left in
    memory or in the log has no reader any more.
    """
    return {
        id
        for (id,) in cur.execute(
            "SELECT tablets.id FROM tablets JOIN tables ON table_id = tables.id "
            "WHERE dropped_ts IS NULL OR dropped_ts < 0"
        )
    }


def purged(cur: apsw.Cursor, ids: Iterable[int]) -> list[int]:
    """Those of some tablets that are there no more."""
    look = "SELECT 1 FROM tablets WHERE id = ?"
    return [id for id in ids if cur.execute(look, (id,)).get is None]


def tablet_ids(cur: apsw.Cursor) -> set[int]:
    """Ids of all tablets, those of dropped tables too."""
    return {id for (id,) in cur.execute("SELECT id FROM tablets")}


def dropped_before(cur: apsw.Cursor, snapshot: int | None) -> list[TableInfo]:
    """The tables that were dropped, and that no snapshot from this one on has; None for none."""
    found: list[Any] = cur.execute(
        f"SELECT {_COLUMNS} FROM tables "
        "WHERE dropped_ts > 0 AND dropped_ts < coalesce(?, dropped_ts + 1)",
        (snapshot,),
    ).fetchall()
    return [_info(cur, *each) for each in found]


SCHEMA = """
CREATE TABLE tables (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    name          TEXT NOT NULL,
    schema        TEXT NOT NULL,
    partitioning  TEXT NOT NULL,
    next_row_id   INTEGER NOT NULL DEFAULT 1,
    dropped_ts    INTEGER,
    schema_since  INTEGER NOT NULL DEFAULT 0,    -- when it was altered to have `schema`
    older_schemas TEXT    NOT NULL DEFAULT '[]'  -- JSON: those before, and since when
);
CREATE UNIQUE INDEX tables_by_name ON tables (name) WHERE dropped_ts IS NULL;
CREATE TABLE tablets (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    table_id  INTEGER NOT NULL REFERENCES tables ON DELETE CASCADE,
    number    INTEGER NOT NULL,
    UNIQUE (table_id, number)
);
CREATE TABLE row_sets (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    tablet_id    INTEGER NOT NULL REFERENCES tablets ON DELETE CASCADE,
    state        INTEGER NOT NULL,   -- 0 writing, 1 staged, 2 committed, 3 retired
    stamp        INTEGER,            -- highest commit timestamp of its rows, once finalized
    txn_id       INTEGER,            -- until finalized; NULL while maintenance writes it
    job_id       TEXT,
    attempt      TEXT,
    counts       INTEGER NOT NULL,   -- 0 for an attempt's, until its job accepts it
    staged_seq   INTEGER,            -- order in which the transaction's row sets came to count
    checked_seq  INTEGER,            -- keys were checked against what counted up to here
    rows         INTEGER,
    bytes        INTEGER,
    min_key      BLOB,
    max_key      BLOB,
    kind         INTEGER NOT NULL DEFAULT 0,  -- 0 rows, 1 keys that a transaction deletes
    supersedes   INTEGER NOT NULL DEFAULT 0,  -- 1: some of its keys were there before
    min_stamp    INTEGER,            -- lowest commit timestamp of its rows
    deleted      INTEGER NOT NULL DEFAULT 0,  -- rows that have a delete stamp
    max_delete   INTEGER NOT NULL DEFAULT 0,  -- the highest of those stamps
    delta_seq    INTEGER NOT NULL DEFAULT 0,  -- changes with its deletes
    versioned    INTEGER NOT NULL DEFAULT 0,  -- 1: a key may have several versions
    retired      INTEGER             -- manifest version that replaced it
);
CREATE INDEX row_sets_by_stamp ON row_sets (tablet_id, stamp) WHERE state = 2;
CREATE INDEX row_sets_by_transaction ON row_sets (txn_id, tablet_id) WHERE txn_id IS NOT NULL;
"""

UPGRADE_7_TO_8 = """
ALTER TABLE tables ADD COLUMN schema_since INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tables ADD COLUMN older_schemas TEXT NOT NULL DEFAULT '[]';
"""

UPGRADE_1_TO_2 = """
ALTER TABLE row_sets ADD COLUMN kind INTEGER NOT NULL DEFAULT 0;
ALTER TABLE row_sets ADD COLUMN supersedes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE row_sets ADD COLUMN min_stamp INTEGER;
ALTER TABLE row_sets ADD COLUMN deleted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE row_sets ADD COLUMN max_delete INTEGER NOT NULL DEFAULT 0;
ALTER TABLE row_sets ADD COLUMN delta_seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE row_sets ADD COLUMN versioned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE row_sets ADD COLUMN retired INTEGER;
UPDATE row_sets SET min_stamp = stamp;
"""
