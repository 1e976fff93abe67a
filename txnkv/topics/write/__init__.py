"""Batches into logs: producers, appending, rolling forward, recovery, truncation."""

from txnkv.topics.write import append, producers, roll_forward
from txnkv.topics.write.append import Attempt, append_runs, is_appended
from txnkv.topics.write.producer_sender import PATIENCE, Delivered, Sender
from txnkv.topics.write.recovery import regain

__all__ = [
    "Attempt",
    "Delivered",
    "PATIENCE",
    "Sender",
    "append",
    "append_runs",
    "is_appended",
    "producers",
    "regain",
    "roll_forward",
]
