"""Tablets at the commit of a transaction: validation, finalize, abort."""

from txnkv.tables.commit.conflicts import LockedByYoungerError, RowWatch, timed_out, validate
from txnkv.tables.commit.tablet_participants import TabletParticipants
