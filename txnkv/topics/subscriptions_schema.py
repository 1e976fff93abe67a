"""The tables of status.db that belong to subscriptions.

What each row means stands where it is used: `cursors`, `acks`, `leases`. Offsets of ranges are
half open: `first` is in it, `last` is not.
"""

from __future__ import annotations

SCHEMA = """
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

UPGRADE_2_TO_3 = SCHEMA
