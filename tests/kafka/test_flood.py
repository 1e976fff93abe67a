"""Many connections that ask for much, send much, or nothing: memory stays, others are served."""

from __future__ import annotations

import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import txnkv
from tests.kafka.test_killed import Serving
from tools.kafka_wire import Wire, batch_of, request

CONNECTIONS = 490
MEBIBYTE = 1 << 20


@pytest.fixture
def serving(store: txnkv.Client, store_path: Path) -> Iterator[Serving]:
    made = Serving(store_path)
    made.start()
    yield made
    made.end(signal.SIGKILL)


def idle() -> bytes:
    return b""


def announced() -> bytes:
    """A request of 60 MiB, of which 1 MiB comes."""
    return struct.pack(">i", 60 * MEBIBYTE) + bytes(MEBIBYTE)


def garbage() -> bytes:
    return bytes(range(256)) * 64


def fetched() -> bytes:
    """All that there is, as much as an answer may have; nobody reads it."""
    wanted = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 2**31 - 1}
    topics = [{"topic": "t", "partitions": [wanted]}]
    return 4 * request("Fetch", 12, replica_id=-1, max_bytes=2**31 - 1, topics=topics, rack_id="")


def bombs() -> bytes:
    """A batch of zeros that are 60 MiB without their compression."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = packer.compress(bytes(60 * MEBIBYTE)) + packer.flush()
    checked = struct.pack(">hiqqqhii", 1, 0, 1, 1, -1, -1, -1, 1) + body
    batch = struct.pack(">qiib", 0, len(checked) + 9, -1, 2)
    batch += struct.pack(">I", txnkv.core.crc32c(checked)) + checked
    topics = [{"name": "t", "partitions": [{"index": 0, "records": batch}]}]
    return request("Produce", 9, acks=-1, timeout_ms=1000, topics=topics)


def names() -> bytes:
    """As many names of topics as a request may have."""
    return request("Metadata", 9, topics=[{"name": ""}] * 19_000) * 2


def _resident(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmRSS" in line)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is told by /proc")
@pytest.mark.parametrize("kind", [idle, announced, garbage, fetched, bombs, names])
def test_a_flood(kind: Callable[[], bytes], store: txnkv.Client, serving: Serving) -> None:
    """While it lasts, and after it, somebody else is answered; memory is that of a few requests."""
    topic = store.create_topic("t")
    for _ in range(48):
        with store.transaction() as txn:
            txn.send(topic, bytes(MEBIBYTE - 100))
    assert serving.popen is not None
    process = serving.popen.pid
    other = Wire(serving.port)
    assert other.produce("t", batch_of(b"before"))["error_code"] == 0
    before = most = _resident(process)
    opened = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(CONNECTIONS)]
    left = dict.fromkeys(opened, kind())
    for each in opened:
        each.setblocking(False)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for each, rest in list(left.items()):
            try:
                left[each] = rest[each.send(rest) :] if rest else rest
            except BlockingIOError:
                continue
            except OSError:
                del left[each]
        most = max(most, _resident(process))
        time.sleep(0.05)
    began = time.monotonic()
    assert other.produce("t", batch_of(b"meanwhile"))["error_code"] == 0
    meanwhile = time.monotonic() - began
    most = max(most, _resident(process))
    for each in opened:
        each.close()
    later = Wire(serving.port)
    assert later.produce("t", batch_of(b"after"))["error_code"] == 0
    after = time.monotonic() - began - meanwhile
    for wire in (other, later):
        wire.socket.close()
    sizes = [size / MEBIBYTE for size in (before, most, _resident(process))]
    print(f"{kind.__name__}: {sizes[0]:.0f} MiB, then {sizes[1]:.0f}, at last {sizes[2]:.0f}")
    print(f"others were answered in {meanwhile:.2f} s, and after it in {after:.2f} s")
    assert most - before < 1000 * MEBIBYTE
