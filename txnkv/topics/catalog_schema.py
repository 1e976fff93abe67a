"""The tables of status.db that belong to topics: catalog, next offsets, end markers."""

SCHEMA = """
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
