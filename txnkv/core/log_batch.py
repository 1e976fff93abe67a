"""Record batches, the unit of a topic's log: the front door to what makes and reads them."""

from __future__ import annotations

from txnkv.core.log_decode import MESSAGES, decode
from txnkv.core.log_encode import encode_batch, encode_control, encode_message
from txnkv.core.log_filter import CommittedFilter, Spans, all_data, decided
from txnkv.core.log_header import (
    CODECS,
    HEADER_BYTES,
    ROW_BYTES,
    Attributes,
    BatchHeader,
    Chunk,
    Control,
    ControlType,
    check_batch,
    intact,
    place,
    place_here,
    read_chunk,
    read_control,
    read_header,
    sound,
    walk,
    within,
)
from txnkv.core.log_headers import decode_headers, encode_headers, join_headers, split_headers

__all__ = [
    "CODECS",
    "HEADER_BYTES",
    "MESSAGES",
    "ROW_BYTES",
    "Attributes",
    "BatchHeader",
    "Chunk",
    "CommittedFilter",
    "Control",
    "ControlType",
    "Spans",
    "all_data",
    "check_batch",
    "decided",
    "decode",
    "decode_headers",
    "encode_batch",
    "encode_control",
    "encode_headers",
    "join_headers",
    "encode_message",
    "intact",
    "place",
    "place_here",
    "read_chunk",
    "read_control",
    "read_header",
    "sound",
    "split_headers",
    "walk",
    "within",
]
