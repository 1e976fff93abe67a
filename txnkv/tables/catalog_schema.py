"""The tables of status.db that belong to tables: catalog, row sets, sequences."""

SCHEMA = """
CREATE TABLE tables (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    name          TEXT NOT NULL,
    schema        TEXT NOT NULL,
    partitioning  TEXT NOT NULL,
    next_row_id   INTEGER NOT NULL DEFAULT 1,
    dropped_ts    INTEGER
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
