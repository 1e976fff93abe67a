"""Logs over time: retention, copies in another store, loss."""

from txnkv.topics.maintenance import retention, unacknowledged
from txnkv.topics.maintenance.follower import Follower
from txnkv.topics.maintenance.log_loss import accept_loss

__all__ = ["Follower", "accept_loss", "retention", "unacknowledged"]
