"""Tablets at the commit of a transaction: validation, finalize, abort."""

from txnkv.tables.commit.conflicts import LockedByYoungerError, Validation, timed_out
from txnkv.tables.commit.tablet_participants import TabletParticipants
