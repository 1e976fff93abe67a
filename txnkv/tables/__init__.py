"""Tables: columnar row sets in LMDB, written by transactions, read at snapshots.

schema, partitioning, table_catalog           what a table is
row_set_format, row_set, row_set_writer       a row set on disk
tablet_files, tablet, manifest, memory, fence which row sets there are, who may write
tables                                        the ground: all tablets of a store
arrow_input, operations, key_lookup, mutations  rows in, and what an operation makes of them
write_buffer, staging                         what a transaction writes: in memory, as row sets
changes, overlap, tablet_participants         validation, finalize, abort
intents, deltas                               delete stamps for what a commit replaced
flush, compaction, history                    from memory to row sets, and fewer of them
predicate, scan, reading, lookup, view        rows out
diff, diff_events, diff_tokens                what changed between two snapshots
table_engine                                  the wiring: work on tables, in transactions and rounds
"""
