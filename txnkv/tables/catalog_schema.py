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
    state        INTEGER NOT NULL,   -- 0 writing, 1 staged, 2 committed
    stamp        INTEGER,            -- commit timestamp, once finalized
    txn_id       INTEGER,            -- until finalized
    job_id       TEXT,
    attempt      TEXT,
    counts       INTEGER NOT NULL,   -- 0 for an attempt's, until its job accepts it
    staged_seq   INTEGER,            -- order in which the transaction's row sets came to count
    checked_seq  INTEGER,            -- keys were checked against what counted up to here
    rows         INTEGER,
    bytes        INTEGER,
    min_key      BLOB,
    max_key      BLOB
);
CREATE INDEX row_sets_by_stamp ON row_sets (tablet_id, stamp) WHERE state = 2;
CREATE INDEX row_sets_by_transaction ON row_sets (txn_id, tablet_id) WHERE txn_id IS NOT NULL;
"""
