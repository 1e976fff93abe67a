"""The bytes of a log in LMDB are those of docs/format-topics.md, and stay so."""

from __future__ import annotations

import struct
from pathlib import Path

from tests.topics.log_tools import ABORT, Log, LogOptions, data, marker, script
from txnkv import core
from txnkv.storage import clock

U64 = struct.Struct(">Q").pack


def dump(log: Log, name: bytes) -> dict[bytes, bytes]:
    with log.environment.read() as txn:
        cursor = txn.cursor(db=log.environment.db(name))
        return {bytes(key): bytes(value) for key, value in cursor}


def test_databases_of_a_log(tmp_path: Path) -> None:
    options = LogOptions(snapshot_seconds=1e9)
    now = 7_000_000
    with clock.replaced(wall=lambda: now), Log(tmp_path / "store", options) as log:
        batches = [data(5, time=900), *script("P6 D7*2"), marker(ABORT, 5, mark=4, time=1100)]
        log.append(*batches, commit_ts=70, together=True)
        placed = core.place(b"".join(batches), 0, 70)
        assert dump(log, b"log") == {U64(0): placed}
        body = struct.pack("<HHQQQqQ", 1, 0, 0, 5, 4, now, 3)
        assert dump(log, b"state") == {b"log": struct.pack("<I", core.crc32c(body)) + body}
        assert dump(log, b"open") == {
            b"i" + U64(6): struct.pack("<Qq", 1, 1000),
            b"o" + U64(1): struct.pack("<Q", 6),
        }
        assert dump(log, b"aborted") == {U64(4) + U64(0): struct.pack(">hqqqq", 0, 5, 0, 4, 1)}
        assert dump(log, b"spans") == {b"\1" + U64(0) + U64(4) + U64(0): b""}
        assert dump(log, b"commits") == {U64(2): struct.pack("<QIQQQ", 2, 2, 7, 2, 70)}
        assert dump(log, b"segments") == {U64(0): struct.pack("<qqQ", 900, 1100, len(placed))}
        log.write("roll")
        last = struct.pack("<qqQ", -(1 << 63), -(1 << 63), 0)
        assert dump(log, b"segments")[U64(5)] == last
        at_0 = struct.pack("<HHQQ", 1, 0, 0, 0)
        at_5 = struct.pack("<HHQQQQq", 1, 0, 4, 1, 6, 1, 1000)
        assert dump(log, b"snapshots") == {
            U64(at): struct.pack("<I", core.crc32c(body, core.crc32c(U64(at)))) + body
            for at, body in ((0, at_0), (5, at_5))
        }
