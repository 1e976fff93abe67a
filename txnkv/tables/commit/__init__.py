"""Tablets at the commit of a transaction: validation, finalize, abort."""

from txnkv.tables.commit.tablet_participants import TabletParticipants
from txnkv.tables.commit.validation import LockedByYoungerError, Validation, timed_out

__all__ = ["LockedByYoungerError", "TabletParticipants", "Validation", "timed_out"]
