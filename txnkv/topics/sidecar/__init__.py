"""The sidecar transaction buffer: batches of open transactions beside the log."""

from txnkv.topics.sidecar import side_check, side_own
from txnkv.topics.sidecar.side_logs import SideLogs

__all__ = ["SideLogs", "side_check", "side_own"]
