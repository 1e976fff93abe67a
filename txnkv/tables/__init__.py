"""Tables: columnar row sets in LMDB, written by transactions, read at snapshots.

types, schema, partitioning, catalog      what a table is
row_set_format, row_set, row_set_writer   a row set on disk
manifest, tablet, fence                   which row sets there are, who may write
ingest, incoming, staging                 rows in
overlap, participant                      validation, finalize, abort
predicate, scan, reading, lookup, view    rows out
engine                                    all of it, for the layers above
"""
