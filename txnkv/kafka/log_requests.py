"""Produce, Fetch, ListOffsets and DeleteRecords: messages in, out and away.

A batch of a producer becomes columns, and these a batch of the log; a fetch goes the other way. So
what any program of the store sends is there for Kafka's clients, and the reverse.

    acks       durable before the answer, be it "1" or "all"; "0" has no answer
    together   small requests that a connection has sent one behind the other are one commit
    idempotent the numbers that a producer gives are checked in the commit that appends its messages
    fetch      the log as it is, with open and aborted messages and markers, up to the last stable
               offset for those who read what is committed, and the list of those aborted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.core import CoreError, encode_records
from txnkv.core import compute as pc
from txnkv.errors import CommitOutcomeUnknownError, CorruptionError, OutOfOrderSequenceError
from txnkv.kafka.api_tables import Code, KafkaError, code_of
from txnkv.kafka.broker import Broker, Handler, Peer
from txnkv.kafka.record_batches import MOST_BYTES, ProducerBatch, read_batch
from txnkv.kafka.transactional_ids import Named
from txnkv.kafka.wire_codec import KafkaRequest
from txnkv.topics import (
    AbortedTxn,
    BatchDecoder,
    Bounds,
    OffsetReader,
    Partition,
    TopicInfo,
    Waiting,
    bounds,
    deadline,
    delete_below,
    fetch,
    offset_for_time,
)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST, _EARLIEST, _NEWEST = -1, -2, -3
_LAST_MILLIS: Final = 253_402_300_799_999
"""The last millisecond that a datetime has."""

_MOST_WAIT_MILLIS: Final = 60_000
_MOST_FETCH_BYTES: Final = 32 << 20
"""The most of one answer, whatever a client asks for."""

_WORK: Final = 3
"""Memory of an answer while it is made: batches of the log, their columns, batches of Kafka's."""

_ACKS: Final = (-1, 0, 1)
_MOST_TOGETHER: Final = 4 << 20
"""Bytes of messages of requests that share a commit, about."""

# -- Produce ---------------------------------------------------------------------------


class _Incoming(NamedTuple):
    at: int
    number: int
    batch: ProducerBatch


@dataclass
class _Told:
    """The batches of one topic in a request.

    Attributes:
        incoming: those that may be appended.
        answers: of the others, by their place in the request.
        nbytes: of messages in `incoming`.
    """

    name: str
    incoming: list[_Incoming]
    answers: dict[int, dict[str, Any]]
    nbytes: int = 0

    @property
    def sender(self) -> tuple[str, int, int]:
        """The topic, the producer and its epoch; of small requests alone, which have one."""
        batch = self.incoming[0].batch
        return self.name, batch.producer_id, batch.epoch


class _LargeError(Exception):
    """A batch asks for memory."""


def produce(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any] | None:
    """Append what is sent; all partitions of a topic in one commit, where they can be."""
    body = request.body
    topics = []
    for told in body["topics"]:
        if body["acks"] in _ACKS:
            read = _read(broker, peer, told, partial(peer.work.take, MOST_BYTES))
            answers = _appended(broker, peer, read, body["transactional_id"])
        else:
            error = KafkaError(Code.INVALID_REQUIRED_ACKS, "acks is 0, 1 or all")
            answers = [_refused(each["index"], error) for each in told["partitions"]]
        topics.append({"name": told["name"], "partition_responses": answers})
    return _told(request, topics)


def produce_together(
    broker: Broker, peer: Peer, requests: Sequence[KafkaRequest]
) -> Iterator[Mapping[str, Any] | None]:
    """Answer requests of a connection, as `produce` does each, in their order.

    Small ones of one producer to one topic that follow each other are one commit. Where that is
    refused, each is tried alone: what is wrong with one is no matter of the others.
    """
    run: list[tuple[KafkaRequest, _Told]] = []
    for request in requests:
        small = _small(broker, peer, request) if len(requests) > 1 else None
        if run and (small is None or not _joins(run, small)):
            yield from _answers(broker, peer, run)
            run = []
        if small is not None:
            run.append((request, small))
        else:
            yield produce(broker, peer, request)
            peer.work.keep(0)
    yield from _answers(broker, peer, run)


def _small(broker: Broker, peer: Peer, request: KafkaRequest) -> _Told | None:
    """The batches of a request that others may share a commit with; None: it has its own."""
    body = request.body
    if body["transactional_id"] or body["acks"] not in _ACKS or len(body["topics"]) != 1:
        return None

    def refuse() -> None:
        raise _LargeError

    found = _read(broker, peer, body["topics"][0], refuse)
    whole = len(found.incoming) == len(body["topics"][0]["partitions"]) > 0
    return found if whole and len(_together(found.incoming)) == 1 else None


def _joins(run: list[tuple[KafkaRequest, _Told]], small: _Told) -> bool:
    known = [told for _, told in run]
    size = sum(told.nbytes for told in known) + small.nbytes
    return known[0].sender == small.sender and size <= _MOST_TOGETHER


def _answers(
    broker: Broker, peer: Peer, run: list[tuple[KafkaRequest, _Told]]
) -> Iterator[Mapping[str, Any] | None]:
    """Append small requests, in one commit where that is taken."""
    offsets: Iterator[int] | None = None
    unknown: Exception | None = None
    if len(run) > 1:
        every = [each for _, told in run for each in told.incoming]
        try:
            offsets = iter(_append(broker, peer, run[0][1].name, every, None))
        except CommitOutcomeUnknownError as error:
            unknown = error
        except Exception:
            pass  # nothing was appended
    for request, told in run:
        if unknown is not None:
            answers = [_refused(each.number, unknown) for each in told.incoming]
        elif offsets is not None:
            answers = [_accepted(each.number, next(offsets)) for each in told.incoming]
        else:
            answers = _appended(broker, peer, told, None)
        yield _told(request, [{"name": told.name, "partition_responses": answers}])


def _told(request: KafkaRequest, topics: list[dict[str, Any]]) -> Mapping[str, Any] | None:
    """The answer to a request; None where none is wanted."""
    if request.body["acks"] != 0:
        return {"responses": topics}
    if any(each.get("error_code") for topic in topics for each in topic["partition_responses"]):
        raise ConnectionAbortedError  # there is no other way to tell
    return None


def _read(broker: Broker, peer: Peer, told: dict[str, Any], take: Callable[[], None]) -> _Told:
    """The batches of one topic, as `read_batch` reads them."""
    found = _Told(told["name"], [], {})
    for at, each in enumerate(told["partitions"]):
        try:
            partition = broker.partition(peer, "write", told["name"], each["index"])
            batch = read_batch(each["records"], max(MOST_BYTES - found.nbytes, 0), take)
            _require_fitting(partition.topic, batch)
            found.nbytes += batch.rows.nbytes
            found.incoming.append(_Incoming(at, each["index"], batch))
        except Exception as error:
            found.answers[at] = _refused(each["index"], error)
    return found


def _appended(
    broker: Broker, peer: Peer, told: _Told, transactional_id: str | None
) -> list[dict[str, Any]]:
    answers = told.answers
    commits = _together(told.incoming)
    while commits:
        some = commits.pop(0)
        try:
            offsets = _append(broker, peer, told.name, some, transactional_id)
        except Exception as error:
            if len(some) > 1 and isinstance(error, OutOfOrderSequenceError):
                commits += [[each] for each in some]  # nothing was appended, and one is to blame
                continue
            answers |= {each.at: _refused(each.number, error) for each in some}
            continue
        for sent, offset in zip(some, offsets, strict=True):
            answers[sent.at] = _accepted(sent.number, offset)
    return [answers[at] for at in sorted(answers)]


def _accepted(index: int, offset: int) -> dict[str, Any]:
    return {
        "index": index,
        "base_offset": offset,
        "log_append_time_ms": -1,
        "log_start_offset": -1,
    }


def _refused(index: int, error: Exception) -> dict[str, Any]:
    code, text = code_of(error)
    if code is Code.PRODUCER_FENCED:  # a batch's epoch is old, whoever has a later one
        code = Code.INVALID_PRODUCER_EPOCH
    rows = error.rows if isinstance(error, _KeylessError) else []
    return {
        "index": index,
        "error_code": code,
        "base_offset": -1,
        "log_append_time_ms": -1,
        "log_start_offset": -1,
        "record_errors": [{"batch_index": row} for row in rows],
        "error_message": text,
    }


class _KeylessError(KafkaError):
    """Messages without a key to a compacted topic.

    Args:
        rows: which ones of their batch.
    """

    def __init__(self, rows: list[int]) -> None:
        super().__init__(Code.INVALID_RECORD, "a compacted topic takes messages with a key")
        self.rows = rows


def _keyless(batch: ProducerBatch) -> list[int]:
    """The messages of a batch that have no key."""
    rows = batch.rows
    if "key" not in rows.schema.names:
        return list(range(rows.num_rows))
    found: list[int] = pc.indices_nonzero(rows.column("key").is_null()).to_pylist()
    return found


def _require_fitting(topic: TopicInfo, batch: ProducerBatch) -> None:
    if topic.options.codec is not None:
        raise KafkaError(
            Code.INVALID_RECORD,
            f"values of topic {topic.name!r} are rows of columns: programs of the store send them",
        )
    keyless = _keyless(batch) if topic.options.cleanup == "compact" else []
    if keyless:
        raise _KeylessError(keyless)
    most = topic.options.max_message_bytes
    if batch.rows.nbytes <= most:
        return
    largest = pc.max(pc.binary_length(batch.rows.column("value"))).as_py() or 0
    if largest > most:
        raise KafkaError(
            Code.MESSAGE_TOO_LARGE,
            f"a value of {largest:,} bytes: through Kafka's protocol {most:,} are the most",
        )


def _together(incoming: list[_Incoming]) -> list[list[_Incoming]]:
    """Those of one commit: of one producer, each to another partition, in no transaction."""
    kinds = {(each.batch.producer_id, each.batch.epoch) for each in incoming}
    open = any(each.batch.transactional for each in incoming)
    alone = open or len(kinds) > 1 or len({each.number for each in incoming}) < len(incoming)
    return [[each] for each in incoming] if alone else [incoming] if incoming else []


def _append(
    broker: Broker, peer: Peer, name: str, some: list[_Incoming], transactional_id: str | None
) -> list[int]:
    """Append batches of one producer to a topic; all or none."""
    topic = broker.topic(peer, "write", name)
    first = some[0].batch
    if first.transactional:
        named = Named(transactional_id or "", first.producer_id, first.epoch)
        (one,) = some
        return [broker.ids.send(named, topic, one.number, one.batch.rows, first.sequence)]
    if transactional_id:  # whose producer may be fenced, which nothing would tell
        raise KafkaError(Code.INVALID_TXN_STATE, "a batch in no transaction, of a producer of some")
    messages = [(each.number, each.batch.rows) for each in some]
    if first.producer_id < 0:
        sent = broker.plain(peer, topic).deliver(messages)
        return [each.base for each in sent]
    sequences = [each.batch.sequence for each in some]
    return broker.deliver(topic, (first.producer_id, first.epoch), messages, sequences)


# -- Fetch -----------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """One partition of a fetch."""

    topic: str
    number: int
    offset: int
    max_bytes: int


class _Empty(NamedTuple):
    """A partition in which nothing was found, up to an end."""

    id: int
    end: int
    answer: dict[str, Any]


def fetch_messages(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Answer with what is there; wait until it is enough, or the time is over."""
    body = request.body
    wanted = [
        _Wanted(
            topic["topic"], each["partition"], each["fetch_offset"], each["partition_max_bytes"]
        )
        for topic in body["topics"]
        for each in topic["partitions"]
    ]
    committed = body["isolation_level"] == 1
    most = min(max(body["max_bytes"], 1), _MOST_FETCH_BYTES)
    millis = min(max(body["max_wait_ms"], 0), _MOST_WAIT_MILLIS)
    waiting = Waiting(broker.engine.watch, deadline(millis / 1000), peer.require_client)
    empty: dict[_Wanted, _Empty] = {}
    while True:
        waiting.mark()
        peer.work.take(_WORK * min(most, sum(max(each.max_bytes, 1) for each in wanted)))
        found = _found(broker, peer, wanted, committed, most, empty)
        size = sum(len(each["records"] or b"") for each in found)
        peer.work.keep(size)
        failed = any(each.get("error_code") for each in found)
        if failed or size >= body["min_bytes"] or not wanted:
            break
        # More was given than was found in one of them: it is on its way.
        pending = any(broker.engine.look(each.id).next_offset > each.end for each in empty.values())
        if waiting.is_over or not waiting.wait(pending):
            break
    topics: dict[str, list[dict[str, Any]]] = {}
    for each, answer in zip(wanted, found, strict=True):
        topics.setdefault(each.topic, []).append(answer)
    return {
        "responses": [
            {"topic": name, "partitions": partitions} for name, partitions in topics.items()
        ]
    }


def _found(
    broker: Broker,
    peer: Peer,
    wanted: list[_Wanted],
    committed: bool,
    most: int,
    empty: dict[_Wanted, _Empty],
) -> list[dict[str, Any]]:
    """The answers of all partitions.

    Args:
        empty: those in which nothing was found; kept over the looks.
    """
    answers = []
    left = most
    for each in wanted:
        try:
            partition = broker.partition(peer, "read", each.topic, each.number)
            known = empty.get(each)
            if known is not None and known.id == partition.id and not _has_grown(broker, known):
                answers.append(known.answer)
                continue
            room = max(min(each.max_bytes, left), 1)
            answer = _fetched(broker, partition, each, room, committed)
        except Exception as error:
            answers.append(_no_records(each.number, error))
            continue
        if len(answer["records"]) > left < most:  # the first alone may have more than there is room
            answers.append(answer | {"records": b""})
            continue
        answers.append(answer)
        left -= len(answer["records"])
        if answer["records"]:
            empty.pop(each, None)
        else:
            empty[each] = _Empty(partition.id, answer["high_watermark"], answer)
        if left <= 0:
            break
    for each in wanted[len(answers) :]:  # no room for them in this answer
        try:
            partition = broker.partition(peer, "read", each.topic, each.number)
            answers.append(_bounds_alone(each.number, bounds(broker.engine, partition)))
        except Exception as error:
            answers.append(_no_records(each.number, error))
    return answers


def _bounds_alone(number: int, found: Bounds) -> dict[str, Any]:
    """The answer of a partition whose messages come with the next fetch."""
    return _no_records(number, None) | {
        "high_watermark": found.high_watermark,
        "last_stable_offset": found.last_stable_offset,
        "log_start_offset": found.start,
    }


def _has_grown(broker: Broker, known: _Empty) -> bool:
    """Tell whether there may be more: what a reader sees next takes an offset first."""
    engine = broker.engine
    return engine.tail.end(known.id) > known.end or engine.look(known.id).next_offset > known.end


def _no_records(number: int, error: Exception | None) -> dict[str, Any]:
    code = Code.NONE if error is None else code_of(error)[0]
    return {
        "partition_index": number,
        "error_code": code,
        "high_watermark": -1,
        "last_stable_offset": -1,
        "log_start_offset": -1,
        "preferred_read_replica": -1,
        "records": b"",
    }


def _fetched(
    broker: Broker, partition: Partition, wanted: _Wanted, room: int, committed: bool
) -> dict[str, Any]:
    isolation = "read_committed" if committed else "read_uncommitted"
    found = fetch(broker.engine, partition, wanted.offset, room, isolation)
    records = b""
    if found.records:
        decoder = BatchDecoder(
            broker.engine, partition, committed=False, begin=0, max_bytes=room, skip_lost=True
        )
        rows, upto = decoder.decode(found.records, (), wanted.offset, found.high_watermark)
        try:
            records = encode_records(found.records, rows, upto)
        except CoreError as error:
            raise CorruptionError(f"{partition.label}: {error}") from None
    aborted: list[AbortedTxn] | None = found.aborted
    return {
        "partition_index": wanted.number,
        "high_watermark": found.high_watermark,
        "last_stable_offset": found.last_stable_offset,
        "log_start_offset": found.start_offset,
        "aborted_transactions": None if aborted is None else [each._asdict() for each in aborted],
        "preferred_read_replica": -1,
        "records": records,
    }


# -- ListOffsets -----------------------------------------------------------------------


def list_offsets(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Offsets of the beginning, the end, or a time."""
    committed = request.body.get("isolation_level") == 1
    topics = []
    for topic in request.body["topics"]:
        found = []
        for each in topic["partitions"]:
            number = each["partition_index"]
            answer: dict[str, Any] = {"partition_index": number, "leader_epoch": -1}
            try:
                partition = broker.partition(peer, "read", topic["name"], number)
                offset, millis = _offset_of(broker, partition, each["timestamp"], committed)
                answer |= {"offset": offset, "timestamp": millis}
            except Exception as error:
                answer |= {"offset": -1, "timestamp": -1, "error_code": code_of(error)[0]}
            found.append(answer)
        topics.append({"name": topic["name"], "partitions": found})
    return {"topics": topics}


def _offset_of(
    broker: Broker, partition: Partition, millis: int, committed: bool
) -> tuple[int, int]:
    """An offset, and the time of its message where it was asked for by a time."""
    newest = _newest(broker, partition) if millis == _NEWEST else None
    ends = bounds(broker.engine, partition)  # after it: they are beyond what comes meanwhile
    end = ends.last_stable_offset if committed else ends.high_watermark
    if millis == _EARLIEST:
        return ends.start, -1
    if millis == _LATEST:
        return end, -1
    if newest is not None:  # brokers look for no earlier one instead
        return newest if newest[0] < end else (-1, -1)
    if millis < 0:
        raise KafkaError(Code.INVALID_REQUEST, f"there is no offset {millis}")
    try:
        when = _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return -1, -1
    offset = offset_for_time(broker.engine, partition, when)
    if offset is None or offset >= end:
        return -1, -1
    reader = OffsetReader(broker.engine, partition, offset, "read_uncommitted", 1 << 16)
    row = next(reader.batches(end, 1), None)
    if row is None:
        return -1, -1
    micros = row.column("timestamp").cast(pa.int64())[0].as_py()
    return offset, micros // 1000


def _newest(broker: Broker, partition: Partition) -> tuple[int, int]:
    """The offset of the message with the latest time, the first of them, and its time."""

    def first(millis: int) -> int | None:
        when = _EPOCH + timedelta(milliseconds=millis)
        return offset_for_time(broker.engine, partition, when)

    low, high = 0, _LAST_MILLIS
    found = first(low)
    if found is None:
        return -1, -1
    while low < high:
        middle = (low + high + 1) // 2
        at = first(middle)
        if at is None:
            high = middle - 1
        else:
            low, found = middle, at
    return found, low


def delete_records(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Give up messages below an offset; -1: all that are decided."""
    topics = []
    for topic in request.body["topics"]:
        found = []
        for each in topic["partitions"]:
            number, offset = each["partition_index"], each["offset"]
            answer: dict[str, Any] = {"partition_index": number, "low_watermark": -1}
            try:
                partition = broker.partition(peer, "admin", topic["name"], number)
                below = None if offset == _LATEST else offset
                answer["low_watermark"] = delete_below(broker.engine, partition, below)
            except Exception as error:
                answer["error_code"] = code_of(error)[0]
            found.append(answer)
        topics.append({"name": topic["name"], "partitions": found})
    return {"topics": topics}


HANDLERS: Final[dict[int, Handler]] = {
    0: produce,
    1: fetch_messages,
    2: list_offsets,
    21: delete_records,
}
"""By number of the request."""
