"""The sidecar transaction buffer: batches of open transactions wait beside the log.

side_logs     the idea, and its calls: append, commit, abort, expand; a check of it all, and what
              of them goes into a backup
side_store    where they lie: chunks, the index of transactions, logs of their own
side_sweep    garbage, retention, compaction into the log
"""

from txnkv.topics.sidecar.side_logs import (
    OWN_DATABASE,
    SideLogs,
    committed_rows,
    put_chunks,
    put_rows,
    side_problems,
)
from txnkv.topics.sidecar.side_store import SIDE, close_all
