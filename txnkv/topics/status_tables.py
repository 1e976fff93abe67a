"""The tables of status.db that belong to topics. All but one came with version 3, at once.

The meaning of each row stands where it is used. Offsets of ranges are half open: `first` is in
it, `last` is not.
"""

from __future__ import annotations

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
    first            INTEGER NOT NULL,     -- from here on there is no other message before it
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
