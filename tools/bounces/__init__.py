"""Kafka's clients, unchanged, in transactions, while everything is stopped and killed.

    source-0, source-1   number messages; the next number is an offset that they commit with them
        | topic `in`
    copier-0, copier-1   read what is committed and send it on, with the offsets of their group
        | topic `out`
    watcher              reads what is committed in `out` all the while

    python -m tools.bounces                16 runs of 100,000 messages

Each run is one of 16: sources, copiers and the server are each stopped (SIGTERM) or killed
(SIGKILL), again and again, one at a time; and the copiers share the partitions by the group, or
have their own. Sources and copiers abort some of their transactions by themselves, too. At the end

    each number is once in `in` and once in `out`, and no other is; in the order of its key
    `out` has in each partition what `in` has there, in its order
    the watcher, who reads again at the end, and the store's own consumer have read the same
    no transaction is open, the offsets of the groups are at the ends, and the store checks clean
"""
