"""Rows out: views, reads of keys, scans, differences between snapshots."""

from txnkv.tables.read import diff, diff_tokens, lookup, reading, scan_tokens
from txnkv.tables.read.diff import COMMIT_TIMESTAMP, OP, DiffRequest
from txnkv.tables.read.diff_tokens import DiffParts, changed
from txnkv.tables.read.predicate import parse
from txnkv.tables.read.reading import Request
from txnkv.tables.read.scan import Plan
from txnkv.tables.read.scan_tokens import TOKEN_ROWS, TokenParts
from txnkv.tables.read.sources import BATCH_ROWS
from txnkv.tables.read.view import EVERY_STAMP, ReadView

__all__ = [
    "BATCH_ROWS",
    "COMMIT_TIMESTAMP",
    "DiffParts",
    "DiffRequest",
    "EVERY_STAMP",
    "OP",
    "Plan",
    "ReadView",
    "Request",
    "TOKEN_ROWS",
    "TokenParts",
    "changed",
    "diff",
    "diff_tokens",
    "lookup",
    "parse",
    "reading",
    "scan_tokens",
]
