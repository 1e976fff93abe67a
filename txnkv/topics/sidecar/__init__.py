"""The sidecar transaction buffer: batches of open transactions wait beside the log.

side_logs     the idea, and its calls: append, commit, abort, expand; a check of it all
side_store    where they lie: chunks, the index of transactions, logs of their own
side_sweep    garbage, retention, compaction into the log
"""

from txnkv.topics.sidecar.side_logs import SideLogs, side_problems
from txnkv.topics.sidecar.side_store import close_all

__all__ = ["SideLogs", "close_all", "side_problems"]
