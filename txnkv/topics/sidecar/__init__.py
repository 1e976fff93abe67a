"""The sidecar transaction buffer: batches of open transactions wait beside the log.

side_logs     the idea, and its calls: append, commit, abort, expand; a check of it all
side_store    where they lie: chunks, the index of transactions, logs of their own
side_sweep    garbage, retention, compaction into the log
side_backup   what of them goes into a backup
"""

from txnkv.topics.sidecar.side_backup import (
    OWN_DATABASE,
    committed_rows,
    put_chunks,
    put_rows,
)
from txnkv.topics.sidecar.side_logs import SideLogs, side_problems
from txnkv.topics.sidecar.side_store import SIDE, close_all
