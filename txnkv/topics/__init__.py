"""Topics: partitions that are logs of record batches, written by transactions, read in order.

partition_state               what a log says of its transactions: stable offset, aborted index
aborted_index, segments, snapshots, log_chunks     the parts of a log
log_state, log_indexes        where they lie in LMDB
log_writer, log_truncate      batches in, and going back
partition_log                 all of a partition's log
topics                        the ground: catalog, partitions and tails of a store
topic_engine                  the wiring: work on topics, in transactions and in rounds
"""
