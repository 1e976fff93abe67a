"""The tables of status.db that belong to producers."""

PRODUCERS_SCHEMA = """
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
