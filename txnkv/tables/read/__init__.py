"""Rows out: views, reads of keys, scans, differences between snapshots."""

from txnkv.tables.read import diff, lookup, point, scan, scan_tokens, short_scan
from txnkv.tables.read.diff import COMMIT_TIMESTAMP, OP, DiffParts, DiffRequest, changed
from txnkv.tables.read.ordering import Order
from txnkv.tables.read.predicate import KeyRange, parse
from txnkv.tables.read.scan import Piece, Plan, Request
from txnkv.tables.read.scan_tokens import TOKEN_ROWS, TokenParts
from txnkv.tables.read.sources import BATCH_ROWS
from txnkv.tables.read.view import OwnThen, ReadView
