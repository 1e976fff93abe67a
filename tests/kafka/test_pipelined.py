"""Produce requests that are sent before those before them are answered.

Those that wait when one is read share a commit; no client can tell, but by the clock.
"""

from __future__ import annotations

import signal
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.bounces.server import Serving
from tools.kafka_wire import Wire, batch_of, request
from txnkv import core
from txnkv.kafka import KafkaServer, log_requests
from txnkv.kafka.api_tables import Code
from txnkv.kafka.wire_codec import _fields_of, _Reader
from txnkv.server import Users
from txnkv.storage.faults import InjectedFault, arm, disarm
from txnkv.topics import Sender
from txnkv.topics.log.partition_log import PartitionLog

Serve = Callable[..., KafkaServer]
Dial = Callable[[KafkaServer], Wire]
VERSION = 7
MANY = 600_000
"""Bytes that go straight into a log."""


class Answer(NamedTuple):
    number: int
    code: int
    offset: int


def asked(
    number: int, batch: bytes, partition: int = 0, *, acks: int = -1, topic: str = "t"
) -> bytes:
    """A Produce of one batch."""
    topics = [{"name": topic, "partitions": [{"index": partition, "records": batch}]}]
    return request("Produce", VERSION, number, acks=acks, timeout_ms=9000, topics=topics,
                   transactional_id=None)  # fmt: skip


def read(wire: Wire) -> Answer:
    reader = _Reader(memoryview(wire.read()))
    number = reader.number(struct.Struct(">i"))
    body = reader.struct(_fields_of(0, VERSION, True))
    found = body["responses"][0]["partition_responses"][0]
    return Answer(number, found["error_code"], found["base_offset"])


def numbered(first: int, *values: bytes, epoch: int = 0) -> bytes:
    return batch_of(*values, producer=(77, epoch), first=first)


class Held:
    """The commits of a server, of which the first waits until it is let go.

    Attributes:
        commits: how many batches each has.
    """

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.began, self.go_on = threading.Event(), threading.Event()

    def together(self, wire: Wire, *requests: bytes) -> None:
        """Send a request, and others that have come when that one is answered."""
        wire.socket.sendall(asked(0, batch_of(b"first"), topic="first"))
        assert self.began.wait(60)
        wire.socket.sendall(b"".join(requests))
        self.go_on.set()
        assert read(wire) == (0, 0, 0)
        del self.commits[0]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, store: txnkv.Client) -> Held:
    made = Held()
    append = log_requests._append

    def counted(broker: Any, peer: Any, name: str, some: list[Any], id: str | None) -> list[int]:
        made.commits.append(len(some))
        made.began.set()
        assert made.go_on.wait(60)
        return append(broker, peer, name, some, id)

    monkeypatch.setattr(log_requests, "_append", counted)
    store.create_topic("first")
    store.create_topic("t", partitions=2)
    return made


def values(store: txnkv.Client, topic: str = "t") -> list[bytes | None]:
    return [message.value for message in _every(store.topic(topic).consumer())]


def test_requests_that_wait_are_one_commit(store: txnkv.Client, wire: Wire, held: Held) -> None:
    """Of both partitions; answers come in the order of the requests."""
    held.together(
        wire,
        asked(1, numbered(0, b"a", b"b")),
        asked(2, numbered(0, b"x"), 1),
        asked(3, numbered(2, b"c")),
        asked(4, numbered(3, b"d")),
        asked(5, numbered(1, b"y"), 1),
    )
    assert [read(wire) for _ in range(5)] == [(1, 0, 0), (2, 0, 0), (3, 0, 2), (4, 0, 3), (5, 0, 1)]
    assert held.commits == [5]
    assert sorted(values(store), key=str) == [b"a", b"b", b"c", b"d", b"x", b"y"]
    wire.socket.sendall(asked(6, numbered(4, b"e")))
    assert read(wire) == (6, 0, 4)


def test_messages_without_numbers_too(store: txnkv.Client, wire: Wire, held: Held) -> None:
    held.together(wire, *(asked(n, batch_of(b"%d" % n, b"-")) for n in range(1, 6)))
    assert [read(wire) for _ in range(5)] == [(n, 0, 2 * n - 2) for n in range(1, 6)]
    assert held.commits == [5]
    assert values(store)[::2] == [b"1", b"2", b"3", b"4", b"5"]


def test_a_bad_batch_is_refused_alone(store: txnkv.Client, wire: Wire, held: Held) -> None:
    bad = batch_of(b"bad")[:-1] + b"\1"
    held.together(wire, *(asked(n, bad if n == 3 else batch_of(b"%d" % n)) for n in range(1, 6)))
    assert [read(wire) for _ in range(5)] == [
        (1, 0, 0), (2, 0, 1), (3, Code.CORRUPT_MESSAGE, -1), (4, 0, 2), (5, 0, 3),
    ]  # fmt: skip
    assert held.commits == [2, 2]
    assert values(store) == [b"1", b"2", b"4", b"5"]


def test_a_gap_is_refused_alone(store: txnkv.Client, wire: Wire, held: Held) -> None:
    """The commit of all is refused, and then each has its own: those of others are taken."""
    held.together(
        wire,
        asked(1, numbered(0, b"a")),
        asked(2, numbered(9, b"gap")),
        asked(3, numbered(0, b"x"), 1),
        asked(4, numbered(1, b"b")),
    )
    gap = (2, Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)
    assert [read(wire) for _ in range(4)] == [(1, 0, 0), gap, (3, 0, 0), (4, 0, 1)]
    assert held.commits == [4, 1, 1, 1, 1]
    assert sorted(values(store), key=str) == [b"a", b"b", b"x"]


def test_a_fenced_producer_is_refused_alone(store: txnkv.Client, wire: Wire, held: Held) -> None:
    held.together(
        wire,
        asked(1, numbered(0, b"a")),
        asked(2, numbered(1, b"b")),
        asked(3, numbered(0, b"c", epoch=1)),
        asked(4, numbered(2, b"late")),
        asked(5, numbered(3, b"later")),
        asked(6, numbered(1, b"d", epoch=1)),
    )
    late = Code.INVALID_PRODUCER_EPOCH
    assert [read(wire) for _ in range(6)] == [
        (1, 0, 0), (2, 0, 1), (3, 0, 2), (4, late, -1), (5, late, -1), (6, 0, 3),
    ]  # fmt: skip
    assert values(store) == [b"a", b"b", b"c", b"d"]


def test_what_comes_again_has_its_offsets(store: txnkv.Client, wire: Wire, held: Held) -> None:
    """Again among others, after an answer that was lost; and twice in what waits."""
    held.together(wire, asked(1, numbered(0, b"a")), asked(2, numbered(1, b"b")))
    assert [read(wire) for _ in range(2)] == [(1, 0, 0), (2, 0, 1)]
    held.began.clear()
    held.go_on.clear()
    wire.socket.sendall(asked(3, numbered(0, b"a")))
    assert held.began.wait(60)
    again = [asked(4, numbered(1, b"b")), asked(5, numbered(2, b"c")), asked(6, numbered(3, b"d"))]
    wire.socket.sendall(b"".join([*again, asked(7, numbered(2, b"c"))]))
    held.go_on.set()
    assert [read(wire) for _ in range(5)] == [(3, 0, 0), (4, 0, 1), (5, 0, 2), (6, 0, 3), (7, 0, 2)]
    assert values(store) == [b"a", b"b", b"c", b"d"]


def test_some_want_no_answer(store: txnkv.Client, wire: Wire, held: Held) -> None:
    held.together(wire, *(asked(n, batch_of(b"%d" % n), acks=n % 2) for n in range(1, 6)))
    assert [read(wire) for _ in range(3)] == [(1, 0, 0), (3, 0, 2), (5, 0, 4)]
    assert held.commits == [5]
    assert values(store) == [b"1", b"2", b"3", b"4", b"5"]


def test_those_before_an_end_are_answered(store: txnkv.Client, wire: Wire, held: Held) -> None:
    """A request without an answer is refused: there is no way to say it but to close."""
    held.together(
        wire,
        asked(1, batch_of(b"a")),
        asked(2, batch_of(b"b")),
        asked(3, batch_of(b"c"), acks=0, topic="nobody"),
    )
    assert [read(wire) for _ in range(2)] == [(1, 0, 0), (2, 0, 1)]
    with pytest.raises((EOFError, ConnectionError)):
        wire.read()
    assert values(store) == [b"a", b"b"]


def test_each_batch_of_a_request_has_an_answer_in_its_place(
    store: txnkv.Client, wire: Wire
) -> None:
    """A partition that came twice had one: clients find answers by their place."""
    store.create_topic("t")
    batches = [(5, batch_of(b"nowhere")), *((0, batch_of(value)) for value in (b"a", b"b"))]
    told = [{"index": number, "records": batch} for number, batch in batches]
    answer = wire.ask("Produce", acks=-1, topics=[{"name": "t", "partitions": told}])
    found = answer["responses"][0]["partition_responses"]
    assert [(each["index"], each["base_offset"]) for each in found] == [(5, -1), (0, 0), (0, 1)]


@pytest.mark.parametrize("bad", [struct.pack(">ihhi", 8, 0, 99, 3), struct.pack(">ihh", 4, 0, 7)])
def test_no_request_behind_others_ends_after_them(
    store: txnkv.Client, wire: Wire, held: Held, bad: bytes
) -> None:
    held.together(wire, asked(1, batch_of(b"a")), asked(2, batch_of(b"b")), bad)
    assert [read(wire) for _ in range(2)] == [(1, 0, 0), (2, 0, 1)]
    with pytest.raises((EOFError, ConnectionError)):
        wire.read()


def test_others_are_answered_in_their_turn(store: txnkv.Client, wire: Wire, held: Held) -> None:
    many = {"name": "t", "partitions": [{"index": n, "records": batch_of(b"m")} for n in (0, 1)]}
    both = request("Produce", VERSION, 4, acks=-1, timeout_ms=9000, topics=[many],
                   transactional_id=None)  # fmt: skip
    held.together(
        wire,
        asked(1, batch_of(b"a")),
        asked(2, batch_of(b"b")),
        request("Metadata", 1, 3, topics=[]),
        both,
        asked(5, batch_of(b"c"), topic="first"),
        asked(6, batch_of(b"d")),
    )
    assert [read(wire) for _ in range(2)] == [(1, 0, 0), (2, 0, 1)]
    assert wire.read()[:4] == struct.pack(">i", 3)
    assert [read(wire) for _ in range(3)] == [(4, 0, 2), (5, 0, 1), (6, 0, 3)]
    assert held.commits == [2, 2, 1, 1]


def bomb(size: int) -> bytes:
    """A batch of zeros, compressed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    count = size // 1000
    plain = batch_of(*[bytes(1000)] * count)
    body = packer.compress(plain[61:]) + packer.flush()
    checked = struct.pack(">hiqqqhii", 1, count - 1, 1, 1, -1, -1, -1, count) + body
    head = struct.pack(">qiib", 0, len(checked) + 9, -1, 2)
    return head + struct.pack(">I", core.crc32c(checked)) + checked


def test_what_asks_for_memory_has_a_commit_of_its_own(
    store: txnkv.Client, server: KafkaServer, wire: Wire, held: Held
) -> None:
    """A few KiB that are megabytes: each waits for memory alone, and gives it back."""
    batches = [batch_of(b"a"), batch_of(b"b"), bomb(3 << 20), bomb(3 << 20), batch_of(b"c")]
    used: list[int] = []
    take = server._broker.work.change

    def change(owner: str, before: int, after: int) -> None:
        take(owner, before, after)
        used.append(server._broker.work._used.total())

    server._broker.work.change = change  # type: ignore[method-assign]
    held.together(wire, *(asked(n, batch) for n, batch in enumerate(batches, 1)))
    found = [read(wire) for _ in range(5)]
    assert found == [(1, 0, 0), (2, 0, 1), (3, 0, 2), (4, 0, 3147), (5, 0, 6292)]
    assert held.commits == [2, 1, 1, 1]
    assert used == [log_requests.MOST_BYTES, 0] * 2


def test_a_commit_has_so_many_bytes(
    store: txnkv.Client, wire: Wire, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_requests, "_MOST_TOGETHER", 10_000)
    held.together(wire, *(asked(n, batch_of(bytes(4000))) for n in range(1, 6)))
    assert [read(wire) for _ in range(5)] == [(n, 0, n - 1) for n in range(1, 6)]
    assert held.commits == [2, 2, 1]


def test_large_requests_are_read_one_by_one(store: txnkv.Client, wire: Wire) -> None:
    """And those that come byte by byte, or in pieces that end anywhere."""
    store.create_topic("t")
    sizes = [100_000, 10, 70_000, 10, 10, 65_400, 65_536, 65_540]
    data = b"".join(asked(n, batch_of(bytes(size))) for n, size in enumerate(sizes))
    sender = threading.Thread(target=_send_in_pieces, args=(wire.socket, data))
    sender.start()
    assert [read(wire) for _ in sizes] == [(n, 0, n) for n in range(len(sizes))]
    sender.join()
    assert [len(value or b"") for value in values(store)] == sizes


def _send_in_pieces(to: socket.socket, data: bytes) -> None:
    for byte in data[:10]:
        to.sendall(bytes([byte]))
    for at in range(10, len(data), 7_001):
        to.sendall(data[at : at + 7_001])


def test_requests_share_a_commit_behind_tls(
    store: txnkv.Client, serve: Serve, held: Held, certificate: tuple[Path, Path]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    wire = Wire(serve(tls=context).port)
    client = ssl.create_default_context(cafile=str(certificate[0]))
    wire.socket = client.wrap_socket(wire.socket, server_hostname="127.0.0.1")
    held.together(wire, *(asked(n, batch_of(b"%d" % n)) for n in range(1, 6)))
    assert [read(wire) for _ in range(5)] == [(n, 0, n - 1) for n in range(1, 6)]
    assert held.commits == [5]
    wire.socket.close()


def test_nothing_is_appended_before_a_log_in(
    store: txnkv.Client, serve: Serve, dial: Dial, tmp_path: Path
) -> None:
    topic = store.create_topic("t")
    (tmp_path / "users.toml").touch(0o600)
    wire = dial(serve(Users(tmp_path / "users.toml")))
    wire.socket.sendall(asked(1, batch_of(b"a")) + asked(2, batch_of(b"b")))
    with pytest.raises((EOFError, ConnectionError)):
        wire.read()
    assert topic.end_offsets() == {0: 0}


# -- many bytes --------------------------------------------------------------------------


def test_many_bytes_go_straight_into_the_log(
    store: txnkv.Client, server: KafkaServer, wire: Wire
) -> None:
    """Of those who number their messages; what waits in memory comes before them."""
    partition = internals.topics(store).partitions(store.create_topic("t").info)[0]
    tail = server._broker.engine.tail
    assert wire.produce("t", numbered(0, b"a", b"b"))["base_offset"] == 0
    assert tail.end(partition.id) == 2
    assert wire.produce("t", numbered(2, b"c", bytes(MANY)))["base_offset"] == 2
    assert wire.produce("t", numbered(4, b"d"))["base_offset"] == 4
    assert wire.produce("t", numbered(2, b"c", bytes(MANY)))["base_offset"] == 2
    gap = Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert wire.produce("t", numbered(6, bytes(MANY)))["error_code"] == gap
    assert wire.produce("t", numbered(5, bytes(MANY)))["base_offset"] == 5
    assert wire.produce("t", numbered(0, bytes(MANY), epoch=1))["base_offset"] == 6
    late = wire.produce("t", numbered(6, bytes(MANY)))
    assert late["error_code"] == Code.INVALID_PRODUCER_EPOCH
    with partition.environment.read() as txn:
        assert partition.log.end(txn) == 7
    assert values(store) == [b"a", b"b", b"c", bytes(MANY), b"d", bytes(MANY), bytes(MANY)]


def test_a_log_that_is_full_and_grows(
    store: txnkv.Client, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append begins anew, with other offsets: it is no duplicate of itself."""
    store.create_topic("t")
    put, full = PartitionLog.put, [lmdb.MapFullError("full")] * 2

    def failing(self: PartitionLog, *told: Any) -> Any:
        if full:
            raise full.pop()
        return put(self, *told)

    for first in (0, 1, 2):
        monkeypatch.setattr(PartitionLog, "put", failing)
        answer = wire.produce("t", numbered(first, b"%d" % first + bytes(MANY)))
        assert answer["error_code"] == 0
        full[:] = [lmdb.MapFullError("full")] * 2
    assert [(value or b"")[:1] for value in values(store)] == [b"0", b"1", b"2"]
    assert store.topic("t").end_offsets()[0] > 3


@pytest.mark.parametrize("point", ["append.reserved", "lmdb.before_commit"])
@pytest.mark.parametrize("hits", [1, 1000])
def test_a_log_that_fails(
    store: txnkv.Client, server: KafkaServer, wire: Wire, point: str, hits: int
) -> None:
    """The numbers are taken and the messages are not there: they are tried again, by the server, or
    by the producer after an error, and what comes behind them is refused until then.
    """
    store.create_topic("t")
    assert wire.produce("t", numbered(0, b"a"))["base_offset"] == 0
    (known,) = server._broker._senders.values()
    known.sender.patience = 0.0 if hits > 1 else 60.0
    left = [hits]

    def fail() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise InjectedFault(point)

    arm(point, fail)
    answer = wire.produce("t", numbered(1, b"b", bytes(MANY)))
    if hits > 1:
        assert answer["error_code"] == Code.REQUEST_TIMED_OUT
        assert wire.produce("t", numbered(1, b"b", bytes(MANY)))["error_code"] != 0
        disarm(point)
        behind = wire.produce("t", numbered(3, b"c"))
        assert behind["error_code"] == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        answer = wire.produce("t", numbered(1, b"b", bytes(MANY)))
    assert answer["error_code"] == 0
    assert wire.produce("t", numbered(3, b"c"))["error_code"] == 0
    again = wire.produce("t", numbered(1, b"b", bytes(MANY)))
    assert again["base_offset"] == answer["base_offset"] > 1
    assert values(store) == [b"a", b"b", bytes(MANY), b"c"]
    disarm(point)


def test_another_server_has_left_numbers_alone(
    store: txnkv.Client, serve: Serve, dial: Dial
) -> None:
    """A producer goes to another one, which fails, and comes back: its batch is no duplicate."""
    store.create_topic("t")
    one, server = dial(serve()), serve()
    two = dial(server)
    assert one.produce("t", numbered(0, bytes(MANY)))["base_offset"] == 0
    assert two.produce("t", numbered(1, b"a"))["base_offset"] == 1
    (known,) = server._broker._senders.values()
    known.sender.patience = 0.0
    arm("append.reserved", "error")
    assert two.produce("t", numbered(2, b"b", bytes(MANY)))["error_code"] != 0
    disarm("append.reserved")
    one.socket.sendall(asked(1, numbered(2, b"b", bytes(MANY))) + asked(2, numbered(4, b"c")))
    found = [read(one), read(one)]
    assert [each.code for each in found] == [0, 0]
    assert [m.offset for m in _every(store.topic("t").consumer())][2::2] == [
        each.offset for each in found
    ]
    assert values(store) == [bytes(MANY), b"a", b"b", bytes(MANY), b"c"]


def test_a_log_that_is_compacted_has_them_from_the_commit_log(store: txnkv.Client) -> None:
    """Where a batch was there may be none any more, and it was not lost."""
    topics = internals.topics(store)
    info = store.create_topic("t", cleanup="compact").info
    rows = pa.record_batch({"value": pa.array([bytes(MANY)], pa.binary()), "key": [b"k"]})
    sender = Sender(topics, info, "kafka:7", epoch=0)
    assert [each.base for each in sender.deliver([(0, rows)], [5])] == [0]
    assert topics.tail.end(info.partitions[0]) == 1


# -- a server that dies ------------------------------------------------------------------


SMALL = ("log.written", "log.durable")
LARGE = ("append.reserved", "status.unsynced", "lmdb.before_commit", "append.written")


@pytest.mark.parametrize(("point", "size"), [*((p, 1) for p in SMALL), *((p, MANY) for p in LARGE)])
def test_what_was_not_answered_comes_once(
    store: txnkv.Client, store_path: Path, point: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies in the commit of several requests, or as a large one goes into the log: their
    producer sends all of them again.
    """
    store.create_topic("t")
    acknowledged: dict[int, int] = {}
    batches = [numbered(2 * n, b"%d" % n, bytes(size)) for n in range(40)]
    for hit in (2, 4, 7, 0):
        if hit:
            monkeypatch.setenv("TXNKV_FAULT", f"{point}=kill@{hit}")
        else:
            monkeypatch.delenv("TXNKV_FAULT")
        serving = Serving(store_path)
        serving.start()
        try:
            _send_all(serving.port, batches, acknowledged)
        except (EOFError, OSError):
            assert hit, "the last server does not die"
        finally:
            serving.end(signal.SIGKILL)
    assert values(store)[::2] == [b"%d" % n for n in range(40)]
    if size == 1:
        assert acknowledged == {n: 2 * n for n in range(40)}
        assert store.topic("t").end_offsets() == {0: 80}
    else:  # some offsets were taken by those who died
        lost = store.topic("t").end_offsets()[0] - 80
        assert (lost > 0) == (point != "append.written")
        consumer = store.topic("t").consumer()
        found = {int(m.value): m.offset for m in _every(consumer) if len(m.value) < 9}
        assert acknowledged == found


def _every(consumer: Any) -> Iterator[Any]:
    while some := consumer.poll(timeout=0):
        yield from some


def _send_all(port: int, batches: list[bytes], acknowledged: dict[int, int]) -> None:
    """Send what has no answer, five requests ahead; what has one, once more at the end."""
    wire = Wire(port)
    left = [n for n in range(len(batches)) if n not in acknowledged]
    try:
        for at in range(0, len(left), 5):
            some = left[at : at + 5]
            wire.socket.sendall(b"".join(asked(n, batches[n]) for n in some))
            for _ in some:
                number, code, offset = read(wire)
                assert code == 0
                assert acknowledged.setdefault(number, offset) == offset
    finally:
        wire.socket.close()
