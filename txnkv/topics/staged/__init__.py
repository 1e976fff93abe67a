"""The messages of a job's attempts: staged files, until the job ends."""

from txnkv.topics.staged import staged_rows
from txnkv.topics.staged.staged_append import StagedLots
from txnkv.topics.staged.staged_sends import StagedSendsFolder
from txnkv.topics.staged.staged_writer import StagedSends

__all__ = ["StagedLots", "StagedSends", "StagedSendsFolder", "staged_rows"]
