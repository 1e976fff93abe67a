"""InitProducerId, and what a transactional producer asks from there to the end of a transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from txnkv.kafka.answer_codes import Code, KafkaError, code_of
from txnkv.kafka.broker import Broker, Handler, Peer
from txnkv.kafka.transactional_ids import Named
from txnkv.kafka.wire_codec import KafkaRequest


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


HANDLERS: Final[dict[int, Handler]] = {
    22: init_producer_id,
    24: add_partitions,
    25: add_offsets,
    26: end,
}
"""By number of the request."""
