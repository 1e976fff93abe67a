"""Tables: columnar row sets in LMDB, written by transactions, read at snapshots.

types, schema, partitioning, catalog      what a table is
row_set_format, row_set, row_set_writer   a row set on disk
manifest, tablet, memory, fence           which row sets there are, who may write
ingest, operations, presence, incoming    rows in, and what an operation makes of them
small, staging                            what a transaction writes: in memory, as row sets
changes, overlap, participant             validation, finalize, abort
resolve, deltas                           delete stamps for what a commit replaced
flush, compaction, history, upkeep        from memory to row sets, and fewer of them
predicate, scan, reading, lookup, view    rows out
diff, diff_events, diff_tokens            what changed between two snapshots
engine                                    all of it, for the layers above
"""
