"""Consumer groups as clients ask for them, and the offsets that they commit.

A committed offset is a row of `kafka_offsets`. It comes with a commit of its own, or in the
transaction of a producer (TxnOffsetCommit), with the messages that it sends: both or neither.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from txnkv.client import LATEST_NOTE, live_members
from txnkv.errors import TxnkvError
from txnkv.kafka.api_tables import Code, KafkaError, code_of
from txnkv.kafka.broker import NODE, Broker, Handler, Peer
from txnkv.kafka.consumer_groups import EMPTY, STABLE, ConsumerGroup, JoinRequest
from txnkv.kafka.transaction_requests import named_producer
from txnkv.kafka.transactional_ids import OffsetKey
from txnkv.kafka.wire_codec import KafkaRequest
from txnkv.transaction import Transaction

_METADATA_MOST: Final = 4096
_CONSUMER: Final = "consumer"
_CLASSIC: Final = "classic"
"""All groups here are of this type: the newer protocol of consumers is not spoken."""


def find_coordinator(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """It is always this broker."""
    at = {"node_id": NODE, "host": peer.host, "port": peer.port}
    keys = request.body.get("coordinator_keys", [])
    return {**at, "coordinators": [{"key": key, **at} for key in keys]}


def _group(broker: Broker, peer: Peer, id: str, *, keep: bool = False) -> ConsumerGroup:
    if not peer.may("read"):
        raise KafkaError(Code.GROUP_AUTHORIZATION_FAILED, "no right to read")
    return broker.groups.get(id, keep=keep)


def _require_kafka(broker: Broker, group: str, code: Code = Code.UNKNOWN_MEMBER_ID) -> None:
    """Refuse a group of which programs of the store are members, which know nothing of others.
    Those that it had here are no members any more.

    Raises:
        KafkaError: it is so.
    """
    found = live_members(broker.client, group)
    if found:
        broker.groups.forget(group)
        raise KafkaError(code, f"group {group!r} has members of the store: {found[0]['process']}")


# -- members ---------------------------------------------------------------------------


def join(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    body = request.body
    asked = JoinRequest(
        body["member_id"],
        body.get("group_instance_id"),
        peer.client_id,
        peer.remote,
        body["session_timeout_ms"],
        body.get("rebalance_timeout_ms", body["session_timeout_ms"]),
        body["protocol_type"],
        {each["name"]: bytes(each["metadata"]) for each in body["protocols"]},
        request.version >= 4,
    )
    try:
        group = _group(broker, peer, body["group_id"], keep=True)
        _require_kafka(broker, group.id, Code.INCONSISTENT_GROUP_PROTOCOL)
        id, joined = group.join(asked, peer.require_client)
    except (KafkaError, TxnkvError) as error:
        code, text = code_of(error)
        id = text if code is Code.MEMBER_ID_REQUIRED else body["member_id"]
        nothing = None if request.version >= 7 else ""
        return {
            "error_code": code,
            "generation_id": -1,
            "protocol_name": nothing,
            "member_id": id,
        }
    return {
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type,
        "protocol_name": joined.protocol,
        # Versions below 9 have no other way to say that it need not assign: another one leads.
        "leader": "" if joined.assigned and request.version < 9 else joined.leader,
        "skip_assignment": joined.assigned,
        "member_id": id,
        "members": [
            {
                "member_id": each.id,
                "group_instance_id": each.instance,
                "metadata": each.protocols.get(joined.protocol, b""),
            }
            for each in joined.members
        ],
    }


def sync(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    body = request.body
    given = {each["member_id"]: bytes(each["assignment"]) for each in body["assignments"]}
    try:
        group = _group(broker, peer, body["group_id"])
        mine = group.sync(
            body["member_id"],
            body.get("group_instance_id"),
            body["generation_id"],
            given,
            peer.require_client,
        )
    except KafkaError as error:
        return {"error_code": error.code}
    return {
        "protocol_type": group.protocol_type,
        "protocol_name": group.protocol,
        "assignment": mine,
    }


def heartbeat(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    body = request.body
    group = _group(broker, peer, body["group_id"])
    _require_kafka(broker, group.id)
    group.heartbeat(body["member_id"], body.get("group_instance_id"), body["generation_id"])
    return {}


def leave(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    body = request.body
    group = _group(broker, peer, body["group_id"])
    if request.version < 3:
        group.leave(body["member_id"], None)
        return {}
    members = []
    for each in body["members"]:
        code = Code.NONE
        try:
            group.leave(each["member_id"], each["group_instance_id"])
        except KafkaError as error:
            code = error.code
        members.append({**each, "error_code": code})
    return {"members": members}


# -- offsets ---------------------------------------------------------------------------

_Commits = dict[OffsetKey, dict[str, Any]]
_Refused = dict[tuple[str, int], Code]


def _committed(broker: Broker, peer: Peer, body: Mapping[str, Any]) -> tuple[_Commits, _Refused]:
    """The rows of what is committed, and the partitions of which nothing can be."""
    rows: _Commits = {}
    refused: _Refused = {}
    now = datetime.now(UTC)
    for topic in body["topics"]:
        for each in topic["partitions"]:
            place = topic["name"], each["partition_index"]
            text = each["committed_metadata"]
            try:
                broker.partition(peer, "read", *place)
                if text is not None and len(text) > _METADATA_MOST:
                    raise KafkaError(Code.OFFSET_METADATA_TOO_LARGE)
            except Exception as error:
                refused[place] = code_of(error)[0]
                continue
            key = (body["group_id"], *place)
            row = dict(zip(("group", "topic", "partition"), key, strict=True))
            epoch = each.get("committed_leader_epoch", -1)
            rest = {"offset": each["committed_offset"], "metadata": text, "committed": now}
            rows[key] = row | rest | {"leader_epoch": None if epoch < 0 else epoch}
    if unsaid := [key for key, row in rows.items() if not row["metadata"]]:
        there = broker.offsets.get_many(unsaid).column("metadata").to_pylist()
        for key, text in zip(unsaid, there, strict=True):
            if LATEST_NOTE.fullmatch(text or ""):  # of a group of the store, which needs it yet
                rows[key]["metadata"] = text
    return rows, refused


def _told(body: Mapping[str, Any], code: Code, refused: _Refused) -> Mapping[str, Any]:
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    {
                        "partition_index": each["partition_index"],
                        "error_code": refused.get((topic["name"], each["partition_index"]), code),
                    }
                    for each in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


def commit(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Offsets by themselves."""
    body = request.body
    code = Code.NONE
    refused: _Refused = {}
    try:
        group = _group(broker, peer, body["group_id"])
        table = broker.offsets

        def write(txn: Any) -> None:
            for row in rows.values():
                txn.upsert(table, row)

        member = body["member_id"], body.get("group_instance_id")
        generation = body["generation_id_or_member_epoch"]
        _require_kafka(broker, group.id)
        with group.committing(*member, generation, in_transaction=False):
            rows, refused = _committed(broker, peer, body)
            if rows:
                broker.client.run(write)
    except Exception as error:
        code = code_of(error)[0]
    return _told(body, code, refused)


def commit_in_transaction(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Offsets in the transaction of a producer."""
    body = request.body
    code = Code.NONE
    refused: _Refused = {}
    try:
        group = _group(broker, peer, body["group_id"])
        member = body.get("member_id", ""), body.get("group_instance_id")
        generation = body.get("generation_id", -1)
        _require_kafka(broker, group.id)
        with group.committing(*member, generation, in_transaction=True):
            rows, refused = _committed(broker, peer, body)
            broker.ids.commit_offsets(named_producer(peer, body), broker.offsets, rows)
    except Exception as error:
        code = code_of(error)[0]
        if code is Code.PRODUCER_FENCED:
            code = Code.INVALID_PRODUCER_EPOCH
    return _told(body, code, refused)


def fetch_offsets(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    body = request.body
    stable = body.get("require_stable", False)
    if request.version < 8:
        return _offsets_of(broker, peer, body["group_id"], body["topics"], stable)
    return {
        "groups": [
            {
                "group_id": each["group_id"],
                **_offsets_of(broker, peer, each["group_id"], each["topics"], stable),
            }
            for each in body["groups"]
        ]
    }


def _rows_of(broker: Broker, group: str) -> list[dict[str, Any]]:
    """The offsets that a group has committed. Whoever reads them goes on there; so they are taken
    from members of the store that are out, as by a successor of their own kind, and what these
    commit late is refused.
    """
    table, where = broker.offsets, [("group", "=", group)]
    rows = list(table.scan(where=where))
    if all(row["member"] is None for row in rows):
        return rows

    def take(txn: Transaction) -> list[dict[str, Any]]:
        rows = list(txn.scan(table, where=where))
        if not live_members(broker.client, group, txn=txn):
            for row in rows:
                if row["member"] is not None:
                    txn.upsert(table, row | {"member": None})
        return rows

    found: list[dict[str, Any]] = broker.client.run(take)
    return found


def _offsets_of(
    broker: Broker, peer: Peer, group: str, topics: list[dict[str, Any]] | None, stable: bool
) -> dict[str, Any]:
    if not peer.may("read"):
        return {"topics": [], "error_code": Code.GROUP_AUTHORIZATION_FAILED}
    # First: what ends after this is among the rows.
    pending = broker.ids.pending() if stable else frozenset()
    try:
        rows = _rows_of(broker, group)
    except TxnkvError as error:  # what clients ask for again, of other codes they do not
        code = Code.COORDINATOR_LOAD_IN_PROGRESS if error.retriable else code_of(error)[0]
        return {"topics": [], "error_code": code}
    known = {(row["topic"], row["partition"]): row for row in rows}
    asked: dict[str, Iterable[int]] = {}
    if topics is None:
        for name, number in known:
            if not peer.may("read", name):
                continue
            asked[name] = [*asked.get(name, ()), number]
    else:
        asked = {topic["name"]: topic["partition_indexes"] for topic in topics}
    answers = []
    for name, numbers in asked.items():
        partitions = []
        for number in numbers:
            row = known.get((name, number), {})
            epoch = row.get("leader_epoch")
            answer = {
                "partition_index": number,
                "committed_offset": row.get("offset", -1),
                "committed_leader_epoch": -1 if epoch is None else epoch,
                "metadata": row.get("metadata") or "",
            }
            if not peer.may("read", name):
                nothing = {"committed_offset": -1, "metadata": ""}
                answer |= nothing | {"error_code": Code.TOPIC_AUTHORIZATION_FAILED}
            elif (group, name, number) in pending:
                answer |= {"committed_offset": -1, "error_code": Code.UNSTABLE_OFFSET_COMMIT}
            partitions.append(answer)
        answers.append({"name": name, "partitions": partitions})
    return {"topics": answers}


# -- groups ----------------------------------------------------------------------------


def _each(ids: list[str], do: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of some groups, of which each may fail by itself."""
    answers = []
    for id in ids:
        try:
            answers.append({"group_id": id, **do(id)})
        except (KafkaError, TxnkvError) as error:
            answers.append({"group_id": id, "error_code": code_of(error)[0]})
    return answers


def _with_offsets(broker: Broker, id: str | None = None) -> set[str]:
    """The groups that have committed anything; of one, whether it has."""
    where = [] if id is None else [("group", "=", id)]
    found = broker.offsets.scan(["group"], where=where).to_arrow().column("group").unique()
    return set(found.to_pylist())


def list_groups(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    if not peer.may("read"):
        return {}
    states = {each.lower() for each in request.body.get("states_filter") or []}
    types = {each.lower() for each in request.body.get("types_filter") or [_CLASSIC]}
    if _CLASSIC not in types:
        return {}
    groups, stored = [], _with_offsets(broker)
    for id in sorted({*stored, *broker.groups.names()}):
        group = broker.groups.find(id)
        state = EMPTY if group is None else group.look()[0]
        if state == EMPTY and live_members(broker.client, id):
            state = STABLE
        if state == EMPTY and id not in stored:
            continue  # somebody has asked for an id of a member, or left and committed nothing
        if not states or state.lower() in states:
            kind = _CONSUMER if group is None else group.protocol_type
            told = {"group_id": id, "protocol_type": kind, "group_state": state}
            groups.append(told | {"group_type": _CLASSIC})
    return {"groups": groups}


def describe_groups(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    rights = peer.operations("group", request.body.get("include_authorized_operations"))

    def described(id: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"authorized_operations": rights}
        group = broker.groups.find(id)
        if not peer.may("read"):
            answer["error_code"] = Code.GROUP_AUTHORIZATION_FAILED
        elif own := live_members(broker.client, id):
            answer |= {"group_state": STABLE, "protocol_type": _CONSUMER, "protocol_data": "range"}
            answer["members"] = [_member_of_the_store(broker, row) for row in own]
        elif group is None:
            known = _with_offsets(broker, id)
            answer["group_state"] = EMPTY if known else "Dead"
            answer["protocol_type"] = _CONSUMER if known else ""
        else:
            state, members = group.look()
            answer |= {
                "group_state": state,
                "protocol_type": group.protocol_type,
                "protocol_data": group.protocol,
                "members": [
                    {
                        "member_id": each.id,
                        "group_instance_id": each.instance,
                        "client_id": each.client_id,
                        "client_host": f"/{each.host}",
                        "member_metadata": each.protocols.get(group.protocol, b""),
                        "member_assignment": each.assignment,
                    }
                    for each in members
                ],
            }
        return answer

    return {"groups": _each(request.body["groups"], described)}


def _member_of_the_store(broker: Broker, row: dict[str, Any]) -> dict[str, Any]:
    where = [("group", "=", row["group"]), ("topic", "=", row["topic"])]
    mine = broker.offsets.scan(where=[*where, ("member", "=", row["member"])], ordered=True)
    numbers = [each["partition"] for each in mine]
    name = row["topic"].encode()
    # Version, topics (each its name and numbers), data of the user: a client's ConsumerProtocol.
    parts = struct.pack(f">hih{len(name)}s", 0, 1, len(name), name)
    parts += struct.pack(f">i{len(numbers)}ii", len(numbers), *numbers, -1)
    return {
        "member_id": f"{row['process']}-{row['member']}",
        "client_id": "txnkv",
        "client_host": f"/{row['process'].rpartition(':')[0]}",
        "member_metadata": b"",
        "member_assignment": parts,
    }


def delete_groups(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Forget groups without members, with their offsets."""

    def delete(id: str) -> dict[str, Any]:
        group = broker.groups.find(id)
        if not peer.may("admin"):
            raise KafkaError(Code.GROUP_AUTHORIZATION_FAILED)
        if (group is not None and group.look()[1]) or live_members(broker.client, id):
            raise KafkaError(Code.NON_EMPTY_GROUP)
        if group is None and id not in _with_offsets(broker, id):
            raise KafkaError(Code.GROUP_ID_NOT_FOUND)
        broker.forget_offsets(peer, id)
        broker.groups.forget(id)
        return {}

    return {"results": _each(request.body["groups_names"], delete)}


def _subscribed(broker: Broker, id: str) -> set[str]:
    """The topics that live members of a group read."""
    found = {row["topic"] for row in live_members(broker.client, id)}
    group = broker.groups.find(id)
    for member in () if group is None else group.look()[1]:
        for metadata in member.protocols.values():
            with suppress(struct.error, UnicodeDecodeError):
                # A client's ConsumerProtocol: version, and its topics.
                (count,), at = struct.unpack_from(">i", metadata, 2), 6
                for _ in range(min(count, len(metadata))):
                    (size,) = struct.unpack_from(">h", metadata, at)
                    found.add(metadata[at + 2 : at + 2 + size].decode())
                    at += 2 + size
    return found


def delete_offsets(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Forget what a group has committed of some partitions that no member of it reads."""
    id, table = request.body["group_id"], broker.offsets
    if not peer.may("admin"):
        return {"error_code": Code.GROUP_AUTHORIZATION_FAILED}
    if broker.groups.find(id) is None and id not in _with_offsets(broker, id):
        return {"error_code": Code.GROUP_ID_NOT_FOUND}
    subscribed = _subscribed(broker, id)
    topics, keys = [], []
    for topic in request.body["topics"]:
        name, found = topic["name"], []
        for each in topic["partitions"]:
            number, code = each["partition_index"], Code.NONE
            try:
                broker.partition(peer, "read", name, number)
                if name in subscribed:
                    raise KafkaError(Code.GROUP_SUBSCRIBED_TO_TOPIC)
                keys.append((id, name, number))
            except Exception as error:
                code = code_of(error)[0]
            found.append({"partition_index": number, "error_code": code})
        topics.append({"name": name, "partitions": found})

    def delete(txn: Any) -> None:
        for key in keys:
            txn.delete_ignore(table, key)

    if keys:
        broker.client.run(delete)
    return {"topics": topics}


HANDLERS: Final[dict[int, Handler]] = {
    8: commit,
    9: fetch_offsets,
    10: find_coordinator,
    11: join,
    12: heartbeat,
    13: leave,
    14: sync,
    15: describe_groups,
    16: list_groups,
    28: commit_in_transaction,
    42: delete_groups,
    47: delete_offsets,
}
"""By number of the request."""
