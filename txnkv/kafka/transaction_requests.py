"""InitProducerId, and what a transactional producer asks from there to the end of a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from txnkv.coordinator import PARTITION, TxnRow, TxnState, status_table
from txnkv.errors import TxnkvError
from txnkv.kafka.api_tables import Code, KafkaError, code_of
from txnkv.kafka.broker import Broker, Handler, Peer
from txnkv.kafka.transactional_ids import Named
from txnkv.kafka.wire_codec import KafkaRequest
from txnkv.storage import clock
from txnkv.topics import Partition, open_in, producers


def named_producer(peer: Peer, body: Mapping[str, Any]) -> Named:
    """The producer of a request.

    Raises:
        KafkaError: the user may not write.
    """
    _require_writer(peer)
    return Named(body["transactional_id"], body["producer_id"], body["producer_epoch"])


def _require_writer(peer: Peer) -> None:
    if not peer.may("write"):
        raise KafkaError(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "no right to write")


def init_producer_id(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Give a producer its id and epoch."""
    body = request.body
    id, epoch = body.get("producer_id", -1), body.get("producer_epoch", -1)
    name = body["transactional_id"]
    nobody = {"producer_id": -1, "producer_epoch": -1}
    try:
        if name is None and not peer.may("write"):
            raise KafkaError(Code.CLUSTER_AUTHORIZATION_FAILED, "no right to write")
        _require_writer(peer)
        if name == "":
            raise KafkaError(Code.INVALID_REQUEST, "a transactional id is not empty")
        if name is None:
            if id >= 0 and 0 <= epoch < 32_766:
                return {"producer_id": id, "producer_epoch": epoch + 1}
            return {"producer_id": broker.ids.new_id(), "producer_epoch": 0}
        given = broker.ids.begin(name, body["transaction_timeout_ms"], Named(name, id, epoch))
        return {"producer_id": given[0], "producer_epoch": given[1]}
    except Exception as error:
        code = code_of(error)[0]
        if code is Code.PRODUCER_FENCED and request.version < 4:
            code = Code.INVALID_PRODUCER_EPOCH
        return {"error_code": code, **nobody}


def _coded(request: KafkaRequest, error: Exception) -> Code:
    code = code_of(error)[0]
    if code is Code.PRODUCER_FENCED and request.version < 2:
        return Code.INVALID_PRODUCER_EPOCH
    return code


def add_partitions(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Let the transaction send to partitions, all of them or none."""
    body = request.body
    partitions = []
    refused: dict[tuple[str, int], Code] = {}
    for topic in body["topics"]:
        for number in topic["partitions"]:
            try:
                partitions.append(broker.partition(peer, "write", topic["name"], number))
            except Exception as error:
                refused[topic["name"], number] = code_of(error)[0]
    others = Code.OPERATION_NOT_ATTEMPTED
    if not refused:
        others = Code.NONE
        try:
            broker.ids.add(named_producer(peer, body), partitions)
        except Exception as error:
            others = _coded(request, error)
    return {
        "results_by_topic": [
            {
                "name": topic["name"],
                "results_by_partition": [
                    {
                        "partition_index": number,
                        "partition_error_code": refused.get((topic["name"], number), others),
                    }
                    for number in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


def add_offsets(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Begin the transaction, where it is the first thing in it."""
    try:
        broker.ids.add(named_producer(peer, request.body), ())
    except Exception as error:
        return {"error_code": _coded(request, error)}
    return {}


def end(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    try:
        broker.ids.end(named_producer(peer, request.body), commit=request.body["committed"])
    except Exception as error:
        return {"error_code": _coded(request, error)}
    return {}


# -- what there is ---------------------------------------------------------------------

_STATES: Final = {
    TxnState.OPEN: "Ongoing",
    TxnState.COMMIT_IN_PROGRESS: "PrepareCommit",
    TxnState.FINALIZE_IN_PROGRESS: "PrepareCommit",
    TxnState.COMMITTED: "CompleteCommit",
    TxnState.ABORT_IN_PROGRESS: "PrepareAbort",
    TxnState.ABORTED: "CompleteAbort",
}
_EMPTY: Final = "Empty"
_OTHERS: Final = ("Dead", "PrepareEpochFence", _EMPTY)
"""States that a filter may name, and that no transaction has."""


class _Seen(NamedTuple):
    """A transaction as Kafka's tools see it.

    Attributes:
        name: its transactional id; of one without, made of its number.
        id, epoch: of the producer; of a transaction without a name, its own number.
        row: of the status table; None: nothing was begun, or it was forgotten.
    """

    name: str
    id: int
    epoch: int
    row: TxnRow | None

    @property
    def state(self) -> str:
        return _EMPTY if self.row is None else _STATES[self.row.state]

    @property
    def began_millis(self) -> int:
        """The time of its begin; -1 where nothing is open."""
        if self.row is None or self.row.state.ended:
            return -1
        return int(self.row.begin_ts.datetime.timestamp() * 1000)


def _transactions(broker: Broker, *, unnamed: bool = True) -> list[_Seen]:
    """Transactions that have a name, and the others that have not ended; those with `unnamed`."""
    names = broker.ids.named()
    with broker.engine.store.status.read() as cur:
        live = {row.txn_id: row for row in status_table.live(cur)}
        found = []
        for name, id, epoch, txn_id in names:
            row = live.pop(txn_id or 0, None)
            if row is None and txn_id is not None:
                row = status_table.find(cur, txn_id)
            found.append(_Seen(name, id, epoch, row))
    others = live.items() if unnamed else ()
    return found + [_Seen(f"txnkv-{id}", id, 0, row) for id, row in others]


def list_transactions(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Transactions by their state, producer and age; none to who may not write, and those without
    a name to admins alone.
    """
    body = request.body
    states, producers = body["state_filters"], body["producer_id_filters"]
    longest = body.get("duration_filter", -1)
    unknown = [each for each in states if each not in (*_STATES.values(), *_OTHERS)]
    now = clock.now_micros() // 1000
    found = []
    seen = _transactions(broker, unnamed=peer.may("admin")) if peer.may("write") else ()
    for each in seen:
        if (states and each.state not in states) or (producers and each.id not in producers):
            continue
        if longest >= 0 and (each.began_millis < 0 or now - each.began_millis <= longest):
            continue
        found.append(
            {
                "transactional_id": each.name,
                "producer_id": each.id,
                "transaction_state": each.state,
            }
        )
    return {"unknown_state_filters": unknown, "transaction_states": found}


def describe_transactions(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    known = {each.name: each for each in _transactions(broker, unnamed=peer.may("admin"))}
    return {
        "transaction_states": [
            {"transactional_id": name, **_transaction_described(broker, peer, known.get(name))}
            for name in request.body["transactional_ids"]
        ]
    }


def _transaction_described(broker: Broker, peer: Peer, seen: _Seen | None) -> dict[str, Any]:
    if not peer.may("write"):
        return {"error_code": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    if seen is None:
        return {"error_code": Code.TRANSACTIONAL_ID_NOT_FOUND}
    topics: dict[str, list[int]] = {}
    timeout = 0
    if seen.row is not None and not seen.row.state.ended:
        timeout = min((seen.row.timeout or 0) // 1000, (1 << 31) - 1)
        with broker.engine.store.status.read() as cur:
            ids = status_table.participants(cur, seen.row.txn_id).get(PARTITION, [])
        for partition in filter(None, map(broker.engine.partition, ids)):
            if peer.may("read", partition.topic.name):
                topics.setdefault(partition.topic.name, []).append(partition.number)
    return {
        "transaction_state": seen.state,
        "transaction_timeout_ms": timeout,
        "transaction_start_time_ms": seen.began_millis,
        "producer_id": seen.id,
        "producer_epoch": seen.epoch,
        "topics": [{"topic": name, "partitions": found} for name, found in topics.items()],
    }


def describe_producers(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Producers of partitions: those with an open transaction, and idempotent ones."""
    seen = {each.row.txn_id: each for each in _transactions(broker) if each.row is not None}
    topics = []
    for asked in request.body["topics"]:
        partitions = []
        for number in asked["partition_indexes"]:
            answer: dict[str, Any] = {"partition_index": number}
            try:
                partition = broker.partition(peer, "read", asked["name"], number)
                answer["active_producers"] = [*_producers(broker, partition, seen)]
            except Exception as error:
                code, text = code_of(error)
                answer |= {"error_code": code, "error_message": text}
            partitions.append(answer)
        topics.append({"name": asked["name"], "partitions": partitions})
    return {"topics": topics}


def _producers(
    broker: Broker, partition: Partition, seen: Mapping[int, _Seen]
) -> Iterator[dict[str, Any]]:
    for txn_id, first in open_in(partition).items():
        if first is None:
            continue  # its messages wait beside the log
        of = seen.get(txn_id, _Seen("", txn_id, 0, None))
        yield _active(of.id, of.epoch, -1, of.began_millis, first)
    for name, id, state in producers.of_partition(broker.engine.store, partition.id):
        told = (name or "").rpartition("kafka:")  # the number that Kafka's client has
        number = int(told[2]) if told[1] and told[2].isdecimal() else id
        yield _active(number, state.epoch, state.last_sequence, state.last_timestamp // 1000, -1)


def _active(id: int, epoch: int, sequence: int, millis: int, first: int) -> dict[str, Any]:
    return {
        "producer_id": id,
        "producer_epoch": epoch,
        "last_sequence": sequence,
        "last_timestamp": millis,
        "coordinator_epoch": -1,
        "current_txn_start_offset": first,
    }


def write_markers(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Abort the transactions of producers, as an admin wants it; in all of their partitions."""
    known = {each.id: each for each in _transactions(broker) if each.state == "Ongoing"}

    def abort(marker: dict[str, Any]) -> Code:
        found = known.get(marker["producer_id"])
        if not peer.may("admin"):
            return Code.CLUSTER_AUTHORIZATION_FAILED
        if marker["transaction_result"]:
            return Code.INVALID_REQUEST  # its own program alone knows that all is there
        if found is None or found.row is None or found.epoch != marker["producer_epoch"]:
            return Code.INVALID_PRODUCER_EPOCH
        try:
            id = broker.client.instance.coordinator.txn_id(found.row.txn_id)
            broker.client.abort_transaction(id)
        except TxnkvError as error:
            return code_of(error)[0]
        return Code.NONE

    answers = []
    for marker in request.body["markers"]:
        code = abort(marker)
        topics = [
            {
                "name": topic["name"],
                "partitions": [
                    {"partition_index": number, "error_code": code}
                    for number in topic["partition_indexes"]
                ],
            }
            for topic in marker["topics"]
        ]
        answers.append({"producer_id": marker["producer_id"], "topics": topics})
    return {"markers": answers}


HANDLERS: Final[dict[int, Handler]] = {
    22: init_producer_id,
    24: add_partitions,
    25: add_offsets,
    26: end,
    27: write_markers,
    61: describe_producers,
    65: describe_transactions,
    66: list_transactions,
}
"""By number of the request."""
