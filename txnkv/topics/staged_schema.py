"""The table of status.db that knows the staged files."""

SCHEMA = """
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
