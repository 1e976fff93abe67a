"""The tables of status.db that belong to the coordinator, and queries that have exactly one row."""

from __future__ import annotations

from typing import Any

import apsw

from txnkv.errors import CorruptionError
from txnkv.storage import extents

UPGRADE_4_TO_5 = """
CREATE TABLE held_parts (               -- damaged: no flush can write to them
    kind        INTEGER NOT NULL,       -- as in payloads
    id          INTEGER NOT NULL,
    flushed_ts  INTEGER NOT NULL,       -- small commits at or below are in its files
    error       TEXT    NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE TABLE held_sections (            -- of small commits that are flushed elsewhere
    commit_ts   INTEGER NOT NULL,
    kind        INTEGER NOT NULL,
    id          INTEGER NOT NULL,
    data        BLOB    NOT NULL,
    PRIMARY KEY (commit_ts, kind, id)
);
"""

UPGRADE_6_TO_7 = """
ALTER TABLE held_sections ADD COLUMN first INTEGER NOT NULL DEFAULT 0;
ALTER TABLE held_sections ADD COLUMN offsets INTEGER NOT NULL DEFAULT 0;
ALTER TABLE held_sections ADD COLUMN crc INTEGER;  -- NULL: from before version 7
"""

UPGRADE_3_TO_4 = """
CREATE TABLE applications (             -- their last version that is committed
    app_id      TEXT    PRIMARY KEY,
    version     INTEGER NOT NULL,
    source      TEXT,                   -- who drives it, if that was said
    commit_ts   INTEGER NOT NULL,
    txn_id      INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE application_marks (        -- what a stored transaction will be, if it commits
    txn_id      INTEGER NOT NULL REFERENCES transactions ON DELETE CASCADE,
    app_id      TEXT    NOT NULL,
    version     INTEGER NOT NULL,
    source      TEXT,
    PRIMARY KEY (txn_id, app_id)
) WITHOUT ROWID;
CREATE TABLE named_transactions (       -- each with one job, for who finds it by its name
    name        TEXT    PRIMARY KEY,
    txn_id      INTEGER NOT NULL REFERENCES transactions ON DELETE CASCADE,
    job_id      TEXT    NOT NULL
) WITHOUT ROWID;
CREATE INDEX named_by_transaction ON named_transactions (txn_id);
"""

_CLOCK = """
CREATE VIEW clock AS                    -- a commit of the log moves it by being there
    SELECT next_txn_id, stage_sequence, manifest_version, flushed_ts, history_floor,
        catalog_version, max(last_timestamp, logged) AS last_timestamp,
        max(last_commit, logged) AS last_commit
    FROM clock_row, (SELECT coalesce(max(commit_ts), 0) AS logged FROM commit_log);
"""

SCHEMA = (
    """
CREATE TABLE store (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    tcid        INTEGER NOT NULL,
    token_key   BLOB    NOT NULL
);
CREATE TABLE clock_row (                -- read as `clock`
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    last_timestamp  INTEGER NOT NULL,   -- no timestamp at or below is given again; both are as
    last_commit     INTEGER NOT NULL,   -- high as what was trimmed of the log: the latest snapshot
    next_txn_id     INTEGER NOT NULL,
    stage_sequence  INTEGER NOT NULL,
    manifest_version INTEGER NOT NULL DEFAULT 1,  -- of all lists of row sets and their deletes
    flushed_ts      INTEGER NOT NULL DEFAULT 0,   -- small commits at or below are in row sets
    history_floor   INTEGER NOT NULL DEFAULT 0,   -- no snapshot below it can be read
    catalog_version INTEGER NOT NULL DEFAULT 1    -- of what tables and topics there are
);
CREATE TABLE commit_log (
    commit_ts  INTEGER PRIMARY KEY,
    txn_id     INTEGER NOT NULL,
    payload    BLOB    NOT NULL
);
CREATE TABLE transactions (
    txn_id          INTEGER PRIMARY KEY,
    state           INTEGER NOT NULL,
    begin_ts        INTEGER NOT NULL,
    snapshot_ts     INTEGER NOT NULL,
    last_update_ts  INTEGER NOT NULL,
    commit_ts       INTEGER,
    timeout         INTEGER,            -- microseconds from begin, NULL = heartbeats alone
    deadline        INTEGER,            -- monotonic microseconds, in the boot named below
    boot            TEXT    NOT NULL,
    keepalive       INTEGER NOT NULL,   -- microseconds without heartbeat until it is aborted
    heartbeat_slot  INTEGER,            -- entry of the runtime file, while OPEN
    isolation       TEXT    NOT NULL,
    locking         TEXT    NOT NULL,
    owner_slot      INTEGER NOT NULL,   -- the process that drives its end: its slot of the
    owner_start     INTEGER NOT NULL,   -- runtime file, and when it took it
    reason          TEXT,               -- why it was aborted
    error           TEXT,               -- class name of the error that its owner is given
    age_ts          INTEGER             -- begin of the first attempt, where this is a retry
);
CREATE INDEX transactions_live ON transactions (state) WHERE state NOT IN (2, 4);
CREATE UNIQUE INDEX heartbeat_slots ON transactions (heartbeat_slot)
    WHERE heartbeat_slot IS NOT NULL;
CREATE TABLE participants (
    txn_id           INTEGER NOT NULL REFERENCES transactions ON DELETE CASCADE,
    kind             TEXT    NOT NULL,
    id               INTEGER NOT NULL,
    state            INTEGER NOT NULL,
    begin_commit_ts  INTEGER,
    PRIMARY KEY (txn_id, kind, id)
) WITHOUT ROWID;
CREATE TABLE jobs (
    id      TEXT PRIMARY KEY,
    txn_id  INTEGER NOT NULL REFERENCES transactions ON DELETE CASCADE,
    state   TEXT NOT NULL               -- running, committed or aborted
) WITHOUT ROWID;
CREATE INDEX jobs_of_transaction ON jobs (txn_id);
CREATE TABLE locks (
    kind        TEXT    NOT NULL,
    id          INTEGER NOT NULL,
    txn_id      INTEGER NOT NULL REFERENCES transactions ON DELETE CASCADE,
    granted_ts  INTEGER NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE TABLE id_ranges (
    first       INTEGER PRIMARY KEY,
    last        INTEGER NOT NULL,
    least_live  INTEGER NOT NULL,
    owner_slot  INTEGER NOT NULL,
    owner_start INTEGER NOT NULL
);
CREATE TABLE lease (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    term        INTEGER NOT NULL,
    owner_slot  INTEGER,                -- slot of the runtime file, and when it was taken
    owner_start INTEGER NOT NULL,
    renewed     INTEGER NOT NULL        -- monotonic microseconds
);
"""
    + UPGRADE_3_TO_4
    + UPGRADE_4_TO_5
    + UPGRADE_6_TO_7
    + extents.SCHEMA
    + _CLOCK
)

UPGRADE_8_TO_9 = "ALTER TABLE clock RENAME TO clock_row;" + _CLOCK

UPGRADE_5_TO_6 = extents.SCHEMA

UPGRADE_1_TO_2 = """
ALTER TABLE clock ADD COLUMN manifest_version INTEGER NOT NULL DEFAULT 1;
ALTER TABLE clock ADD COLUMN flushed_ts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE clock ADD COLUMN history_floor INTEGER NOT NULL DEFAULT 0;
ALTER TABLE clock ADD COLUMN catalog_version INTEGER NOT NULL DEFAULT 1;
CREATE TABLE commit_log (
    commit_ts  INTEGER PRIMARY KEY,
    txn_id     INTEGER NOT NULL,
    payload    BLOB    NOT NULL
);
"""


def one(cur: apsw.Cursor, sql: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """The first row of a query that always has one.

    Raises:
        CorruptionError: it has none: a row of the status database is gone.
    """
    found = cur.execute(sql, values).fetchone()
    if found is None:
        raise CorruptionError(f"status.db: no row for {sql!r}. Restore the store from a backup")
    return tuple(found)


def one_whole(cur: apsw.Cursor, sql: str) -> tuple[Any, ...]:
    """`one`, of columns that are never null.

    Raises:
        CorruptionError: as `one`, or one is.
    """
    found = one(cur, sql)
    if None in found:
        raise CorruptionError(f"status.db: nulls in {sql!r}. Restore the store from a backup")
    return found
