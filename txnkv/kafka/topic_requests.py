"""Metadata, topics and their options, and who a client is.

A store is a cluster of one broker, which leads every partition and is its only replica. The address
that clients are told is the one at which they have come, or what `--kafka-advertise` says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

from txnkv.errors import (
    AuthenticationError,
    NotSupportedError,
    TopicExistsError,
    TopicNotFoundError,
    TxnkvError,
)
from txnkv.kafka.api_tables import Code, KafkaError, code_of
from txnkv.kafka.broker import NODE, Broker, Handler, Peer
from txnkv.kafka.wire_codec import MOST_TEXT, KafkaRequest, MalformedError
from txnkv.server import SCRAM, ScramExchange, Users
from txnkv.topics import MAX_PARTITIONS, TopicInfo, TopicOptions

_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_TOPIC, _BROKER = 2, 4
_PLAIN: Final = "PLAIN"

# -- the cluster -----------------------------------------------------------------------


def metadata(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Topics with their partitions, and the broker."""
    body = request.body
    asked = body["topics"]
    every = asked is None or (request.version == 0 and not asked)
    named = [] if every else [each["name"] for each in asked if each["name"] is not None]
    failed: dict[str, Code] = {}
    if broker.new_partitions and body.get("allow_auto_topic_creation", True):
        failed = _make_missing(broker, peer, named)
    # Once: a name that is not there would be looked up for itself.
    there = [name for name in broker.engine.names() if len(name.encode()) <= MOST_TEXT]
    topics: list[dict[str, Any]] = []
    if len(named) < len(asked or ()):
        if request.version < 10:
            raise MalformedError("a topic without a name, before topics have ids")
        ids = [each["topic_id"] for each in asked if each["name"] is None]
        seen = [name for name in there if peer.may("read", name) or peer.may("write", name)]
        named, topics = _by_ids(broker, named, ids, seen)
    known = frozenset(there)
    for name in there if every else named:
        if every and not peer.may("read", name) and not peer.may("write", name):
            continue
        found = _described(broker, peer, name, known)
        if name in failed:
            found["error_code"] = failed[name]
        rights = body.get("include_topic_authorized_operations")
        found["topic_authorized_operations"] = peer.operations("topic", rights, name)
        topics.append(found)
    return {
        "brokers": [{"node_id": NODE, "host": peer.host, "port": peer.port}],
        "cluster_id": broker.cluster_id,
        "controller_id": NODE,
        "topics": topics,
        "cluster_authorized_operations": peer.operations(
            "cluster", body.get("include_cluster_authorized_operations")
        ),
    }


def _id_of(broker: Broker, topic: TopicInfo) -> bytes:
    """An id that no other topic has, one that is made later under the same name neither."""
    return sha256(f"{broker.cluster_id}/{topic.id}".encode()).digest()[:16]


def _by_ids(
    broker: Broker, names: list[str], ids: list[bytes], there: Iterable[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Names with those of ids, and the answers for ids that there are not."""
    topics = filter(None, map(broker.engine.find, there))
    known = {_id_of(broker, each): each.name for each in topics}
    missing: list[dict[str, Any]] = [
        {"name": None, "topic_id": id, "error_code": Code.UNKNOWN_TOPIC_ID}
        for id in ids
        if id not in known
    ]
    return names + [known[id] for id in ids if id in known], missing


def _make_missing(broker: Broker, peer: Peer, names: list[str]) -> dict[str, Code]:
    """Make topics that there are not, and that the user may make; codes of those that fail."""
    failed = {}
    for name in names:
        if broker.engine.find(name) is None and peer.may("admin", name) and _is_name(name):
            try:
                with suppress(TopicExistsError):
                    _create(broker, name, broker.new_partitions)
            except (KafkaError, TxnkvError) as error:
                failed[name] = code_of(error)[0]
    return failed


def _create(broker: Broker, name: str, count: int, **options: Any) -> None:
    try:
        broker.client.create_topic(name, count, **options)
    except ValueError as error:
        raise KafkaError(Code.INVALID_PARTITIONS, str(error)) from None


def _described(broker: Broker, peer: Peer, name: str, known: Set[str]) -> dict[str, Any]:
    answer: dict[str, Any] = {"name": name}
    try:
        if not peer.may("read", name):
            peer.require("write", name)
        found = broker.engine.find(name) if name in known else None
        if found is None and not _is_name(name):
            raise KafkaError(Code.INVALID_TOPIC, f"no topic has the name {name!r}")
        if found is None:
            raise TopicNotFoundError(f"there is no topic {name!r}")
    except (KafkaError, TxnkvError) as error:
        return answer | {"error_code": code_of(error)[0]}
    partitions = [
        {
            "partition_index": number,
            "leader_id": NODE,
            "leader_epoch": -1,
            "replica_nodes": [NODE],
            "isr_nodes": [NODE],
        }
        for number in range(len(found.partitions))
    ]
    return answer | {"partitions": partitions, "topic_id": _id_of(broker, found)}


def describe_cluster(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    return {
        "endpoint_type": 1,
        "cluster_id": broker.cluster_id,
        "controller_id": NODE,
        "brokers": [{"broker_id": NODE, "host": peer.host, "port": peer.port}],
        "cluster_authorized_operations": peer.operations(
            "cluster", request.body["include_cluster_authorized_operations"]
        ),
    }


# -- topics ----------------------------------------------------------------------------


def _each(items: list[Any], do: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of things of different names, of which each may fail by itself: as one does that
    comes twice.
    """
    named = [item if isinstance(item, str) else item["name"] for item in items]
    answers, times = [], Counter(named)
    for name, item in dict(zip(named, items, strict=True)).items():
        try:
            if times[name] > 1:
                said = f"{name!r} comes {times[name]} times: name it once"
                raise KafkaError(Code.INVALID_REQUEST, said)
            answers.append(do(item))
        except Exception as error:
            code, text = code_of(error)
            answers.append({"name": name, "error_code": code, "error_message": text})
    return answers


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def create_topics(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Make topics of Kafka's options that there are here."""

    def create(told: dict[str, Any]) -> dict[str, Any]:
        name = told["name"]
        peer.require("admin", name)
        if not _is_name(name):
            text = f"{name!r}: up to 249 letters, digits, . _ and - are a name, not . or .. alone"
            raise KafkaError(Code.INVALID_TOPIC, text)
        if told["replication_factor"] not in (-1, 1):
            raise KafkaError(Code.INVALID_REPLICATION_FACTOR, "there is one broker: say 1")
        placed = {each["partition_index"]: each["broker_ids"] for each in told["assignments"]}
        if placed != {number: [NODE] for number in range(len(told["assignments"]))}:
            raise KafkaError(
                Code.INVALID_REPLICA_ASSIGNMENT, f"each of the partitions is on broker {NODE} alone"
            )
        count = len(placed) or told["num_partitions"]
        count = 1 if count == -1 else count
        options = _options({each["name"]: each["value"] for each in told["configs"]}, _PASSED)
        if options.get("cleanup") == "compact" and options.get("buffer") == "sidecar":
            raise _not_compacted()
        if broker.engine.find(name) is not None:
            raise TopicExistsError(f"there is a topic {name!r} already")
        _require_count(count)
        if not request.body["validate_only"]:
            _create(broker, name, count, **options)
        made = broker.engine.find(name)
        return {
            "name": name,
            "num_partitions": count,
            "replication_factor": 1,
            # Java's client takes no null here, whatever the protocol says.
            "configs": [] if made is None else _told(_configs(made)),
        }

    return {"topics": _each(request.body["topics"], create)}


def _require_count(count: int) -> None:
    if not 1 <= count <= MAX_PARTITIONS:
        raise KafkaError(
            Code.INVALID_PARTITIONS, f"{count} partitions: a topic has 1 to {MAX_PARTITIONS}"
        )


def delete_topics(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    def delete(name: str) -> dict[str, Any]:
        peer.require("admin", name)
        broker.client.drop_topic(name)
        return {"name": name}

    return {"responses": _each(request.body["topic_names"], delete)}


def create_partitions(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Add partitions to topics."""

    def add(told: dict[str, Any]) -> dict[str, Any]:
        name, count, placed = told["name"], told["count"], told["assignments"]
        topic = broker.topic(peer, "admin", name)
        there = len(topic.partitions)
        if count <= there:
            raise KafkaError(
                Code.INVALID_PARTITIONS, f"{name!r} has {there} partitions: there can be more"
            )
        _require_count(count)
        if placed is not None and [each["broker_ids"] for each in placed] != [[NODE]] * (
            count - there
        ):
            raise KafkaError(
                Code.INVALID_REPLICA_ASSIGNMENT, f"each new partition is on broker {NODE} alone"
            )
        if not request.body["validate_only"]:
            try:
                broker.client.topic(name).alter(partitions=count)
            except (ValueError, NotSupportedError) as error:
                raise KafkaError(Code.INVALID_PARTITIONS, str(error)) from None
        return {"name": name}

    return {"results": _each(request.body["topics"], add)}


# -- options ---------------------------------------------------------------------------

_PASSED: Final = {
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
}
"""Options that may be said as they are anyway."""

_NEVER: Final = "-1"
_MOST_MILLIS: Final = 1 << 53
"""More is for ever."""

_POLICY: Final = "cleanup.policy"

_CHANGED: Final = {
    "retention.ms": _NEVER,
    "retention.bytes": _NEVER,
    "compression.type": "producer",
    _POLICY: "delete",
    "delete.retention.ms": "86400000",
}
"""Options that may be changed, and what they are where nobody says it."""

_MADE: Final = ("segment.bytes", "segment.ms", "txnkv.buffer")
"""Options that may be said when a topic is made."""

_POLICIES: Final[dict[str, dict[str, Any]]] = {
    "delete": {"cleanup": "delete"},
    "compact": {"cleanup": "compact", "all": True},
    "compact,delete": {"cleanup": "compact"},
}
"""By policy, options; `all`: whatever is said of retention, each key keeps its last message."""

_KEPT: Final = ("retention_seconds", "retention_bytes")
_LIMITS: Final = (*_KEPT, "tombstone_seconds")
_SIZES: Final = ("segment_bytes", "segment_seconds")

_SET, _DELETE, _APPEND, _SUBTRACT = 0, 1, 2, 3


def _options(configs: Mapping[str, str | None], fixed: Mapping[str, str]) -> dict[str, Any]:
    """Options of a topic, as the client takes them.

    Args:
        configs: as Kafka names them.
        fixed: those that may be said as they are anyway.

    Raises:
        KafkaError: one is not known, or says what cannot be had.
    """
    found: dict[str, Any] = {}
    for name, value in configs.items():
        try:
            if name == "retention.ms":
                found["retention_seconds"] = None if value == _NEVER else _seconds(value)
            elif name == "retention.bytes":
                found["retention_bytes"] = None if value == _NEVER else _long(value)
            elif name == "compression.type":
                codec = {"producer": None, "uncompressed": None, "lz4": "lz4", "zstd": "zstd"}
                found["compression"] = codec[value or ""]
            elif name == _POLICY:
                found |= _POLICIES[",".join(sorted((value or "").replace(" ", "").split(",")))]
            elif name == "delete.retention.ms":
                found["tombstone_seconds"] = _long(value) / 1000
            elif name == "segment.bytes" and name not in fixed:
                found["segment_bytes"] = _long(value)
            elif name == "segment.ms" and name not in fixed:
                found["segment_seconds"] = _long(value) / 1000
            elif name == "txnkv.buffer" and name not in fixed:
                found["buffer"] = {"marker": "marker", "sidecar": "sidecar"}[value or ""]
            elif fixed.get(name) != value:
                raise KeyError(name)
            if any((found.get(each) or 0) < 0 for each in _LIMITS):
                raise ValueError(name)
            if any(found.get(each, 1) <= 0 for each in _SIZES):
                raise ValueError(name)
        except (KeyError, ValueError):
            had = name in _CHANGED or (name in _MADE and name not in fixed)
            text = f"has no value {value!r}" if had else f"={value} cannot be had: leave it away"
            raise KafkaError(Code.INVALID_CONFIG, f"{name}{' ' * had}{text}") from None
    if found.pop("all", False):
        found |= dict.fromkeys(_KEPT)
    return found


def _long(text: str | None) -> int:
    """A number of Kafka's 64 bits.

    Raises:
        ValueError: it is none.
    """
    found = int(text or "")
    if abs(found) >= 1 << 63:
        raise ValueError(text)
    return found


def _seconds(text: str | None) -> float | None:
    """The seconds of milliseconds; None for more than anybody means."""
    millis = _long(text)
    return None if millis > _MOST_MILLIS else millis / 1000


def _not_compacted() -> KafkaError:
    return KafkaError(Code.INVALID_CONFIG, "topics of txnkv.buffer=sidecar are not compacted")


def _policy(options: TopicOptions) -> str:
    kept = options.retention_seconds is None and options.retention_bytes is None
    return "compact,delete" if options.cleanup == "compact" and not kept else options.cleanup


def _configs(topic: TopicInfo) -> dict[str, str]:
    options = topic.options
    seconds, size = options.retention_seconds, options.retention_bytes
    return {
        **_PASSED,
        _POLICY: _policy(options),
        "delete.retention.ms": str(int(options.tombstone_seconds * 1000)),
        "compression.type": options.compression or "producer",
        "max.message.bytes": str(options.max_message_bytes),
        "retention.ms": _NEVER if seconds is None else str(int(seconds * 1000)),
        "retention.bytes": _NEVER if size is None else str(size),
        "segment.bytes": str(options.segment_bytes),
        "segment.ms": str(int(options.segment_seconds * 1000)),
        "txnkv.buffer": topic.buffer,
    }


_OF_TOPIC, _BY_DEFAULT = 1, 5


def _told(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": key,
            "value": value,
            "read_only": key not in _CHANGED,
            "config_source": _BY_DEFAULT if _CHANGED.get(key, value) == value else _OF_TOPIC,
        }
        for key, value in values.items()
    ]


def alter_configs(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Change options of topics: those that are named, the others are as by default."""

    def wanted(asked: list[dict[str, Any]], now: Mapping[str, str]) -> dict[str, str | None]:
        return {**_CHANGED, **{each["name"]: each["value"] for each in asked}}

    return _altered(broker, peer, request, wanted)


def change_configs(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Change options of topics: those that are named, the others stay."""

    def wanted(asked: list[dict[str, Any]], now: Mapping[str, str]) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for each in asked:
            name, kind = each["name"], each["config_operation"]
            if kind in (_APPEND, _SUBTRACT) and name == _POLICY:
                found[name] = _listed(now[name], each["value"] or "", adds=kind == _APPEND)
                continue
            if kind not in (_SET, _DELETE) or (kind == _DELETE and name not in _CHANGED):
                raise KafkaError(Code.INVALID_CONFIG, f"{name} can be set, if at all")
            found[name] = each["value"] if kind == _SET else _CHANGED[name]
        return found

    return _altered(broker, peer, request, wanted)


def _listed(now: str, more: str, *, adds: bool) -> str:
    """An option that is a list, with more in it or less; what would be empty is as by default."""
    there, named = set(now.split(",")), set(more.split(","))
    return ",".join(sorted(there | named if adds else there - named)) or _CHANGED[_POLICY]


def _altered(
    broker: Broker,
    peer: Peer,
    request: KafkaRequest,
    wanted: Callable[[list[dict[str, Any]], Mapping[str, str]], Mapping[str, str | None]],
) -> Mapping[str, Any]:
    def alter(asked: dict[str, Any]) -> None:
        if asked["resource_type"] != _TOPIC:
            raise KafkaError(Code.INVALID_REQUEST, "options of topics can be changed, no others")
        topic = broker.topic(peer, "admin", asked["resource_name"])
        now = _configs(topic)
        fixed = {key: value for key, value in now.items() if key not in _CHANGED}
        changes: Any = _options(wanted(asked["configs"], now), fixed)
        if changes.get("cleanup") == "compact" and topic.buffer != "marker":
            raise _not_compacted()
        if now[_POLICY] == "compact" and "cleanup" not in changes:  # of no effect, as in Kafka
            changes |= dict.fromkeys(changes.keys() & set(_KEPT))
        if not request.body["validate_only"]:
            broker.client.topic(topic.name).alter(**changes)

    answers = []
    for asked in request.body["resources"]:
        answer = {key: asked[key] for key in ("resource_type", "resource_name")}
        try:
            alter(asked)
        except Exception as error:
            code, text = code_of(error)
            answer |= {"error_code": code, "error_message": text}
        answers.append(answer)
    return {"responses": answers}


def describe_configs(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    results = []
    for asked in request.body["resources"]:
        kind, name = asked["resource_type"], asked["resource_name"]
        answer: dict[str, Any] = {"resource_type": kind, "resource_name": name}
        try:
            if kind == _TOPIC:
                values = _configs(broker.topic(peer, "read", name))
            elif kind == _BROKER:
                made = broker.new_partitions
                values = {
                    "auto.create.topics.enable": str(made > 0).lower(),
                    "num.partitions": str(made or 1),
                }
            else:
                raise KafkaError(Code.INVALID_REQUEST, "options are of topics and brokers")
            keys = asked["configuration_keys"]
            answer["configs"] = _told(
                {key: value for key, value in values.items() if keys is None or key in keys}
            )
        except Exception as error:
            code, text = code_of(error)
            answer |= {"error_code": code, "error_message": text}
        results.append(answer)
    return {"results": results}


# -- who it is -------------------------------------------------------------------------


def sasl_handshake(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Agree on how a client says who it is."""
    mechanism = request.body["mechanism"]
    spoken = [_PLAIN] if broker.users is None else [_PLAIN, SCRAM]
    if mechanism not in spoken:
        return {"error_code": Code.UNSUPPORTED_SASL_MECHANISM, "mechanisms": spoken}
    peer.mechanism, peer.scram = mechanism, None
    return {"mechanisms": spoken}


def sasl_authenticate(broker: Broker, peer: Peer, request: KafkaRequest) -> Mapping[str, Any]:
    """Take a user's name and token, or a proof that the client knows it."""
    if not peer.mechanism:
        return {"error_code": Code.ILLEGAL_SASL_STATE, "error_message": "a handshake comes first"}
    told = bytes(request.body["auth_bytes"])
    try:
        if peer.mechanism == SCRAM and broker.users is not None:
            return {"auth_bytes": _by_scram(broker.users, peer, told)}
        peer.mechanism = ""
        _, name, token = (part.decode() for part in told.split(b"\0"))
        peer.entry = broker.entry_of(name)  # before: what comes later shows
        peer.user = broker.log_in(name, token)
    except (ValueError, AuthenticationError):
        peer.user, peer.mechanism, peer.entry = None, "", None
        return {
            "error_code": Code.SASL_AUTHENTICATION_FAILED,
            "error_message": "the user name and its token are nobody's",
        }
    return {"auth_bytes": b""}


def _by_scram(users: Users, peer: Peer, told: bytes) -> bytes:
    """Answer one of the two messages of a log in."""
    if peer.scram is None:
        peer.scram = ScramExchange(users)
        return peer.scram.answer(told)
    peer.entry = users.entry_of(peer.scram.name)
    answer = peer.scram.answer(told)
    peer.user, peer.mechanism, peer.scram = peer.scram.user, "", None
    return answer


HANDLERS: Final[dict[int, Handler]] = {
    3: metadata,
    17: sasl_handshake,
    19: create_topics,
    20: delete_topics,
    32: describe_configs,
    33: alter_configs,
    36: sasl_authenticate,
    37: create_partitions,
    44: change_configs,
    60: describe_cluster,
}
"""By number of the request."""
