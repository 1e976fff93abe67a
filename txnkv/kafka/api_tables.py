"""The protocol of Kafka as tables: requests, answers, and the codes of errors.

A field has its type, and the versions that have it:

    0 Produce 3-9 9                        its number, the versions spoken, the first flexible one
      > acks:i16 topics[name:str ...]      the request: an array of structs has its fields in [ ]
      < responses[... message:str?@8+]     the answer: a field that may be null, from version 8 on

A version below the first flexible one has lengths of 2 and 4 bytes; from it on they are varints of
the length and one, and each struct ends with tagged fields: none of ours, and those of a client are
passed over. `wire_codec` reads and writes all of it by these tables.

Versions that name topics by ids are left out (Produce 13, Fetch 13, DeleteTopics 6, CreateTopics
7) but for those of Metadata, by which clients learn that a topic was dropped and made again; and so
are those of the second version of transactions and of groups without a leader. Clients take the
latest version that both know.

An error of the store has a code of its kind (`code_of`).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

from txnkv.errors import (
    AuthenticationError,
    CommitOutcomeUnknownError,
    CorruptionError,
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    StorageFullError,
    TopicExistsError,
    TopicNotFoundError,
    TransactionConflictError,
    TxnkvError,
    TxnNotFoundError,
    UnavailableError,
)

_TABLE: Final = """
0 Produce 3-9 9
  > transactional_id:str? acks:i16 timeout_ms:i32 topics[name:str partitions[index:i32
    records:records?]]
  < responses[name:str partition_responses[index:i32 error_code:i16 base_offset:i64
    log_append_time_ms:i64 log_start_offset:i64@5+ record_errors@8+[batch_index:i32
    batch_index_error_message:str?] error_message:str?@8+]] throttle_time_ms:i32
1 Fetch 4-12 12
  > replica_id:i32 max_wait_ms:i32 min_bytes:i32 max_bytes:i32 isolation_level:i8
    session_id:i32@7+ session_epoch:i32@7+ topics[topic:str partitions[partition:i32
    current_leader_epoch:i32@9+ fetch_offset:i64 last_fetched_epoch:i32@12+
    log_start_offset:i64@5+ partition_max_bytes:i32]] forgotten_topics_data@7+[topic:str
    partitions:[]i32] rack_id:str@11+
  < throttle_time_ms:i32 error_code:i16@7+ session_id:i32@7+ responses[topic:str
    partitions[partition_index:i32 error_code:i16 high_watermark:i64 last_stable_offset:i64
    log_start_offset:i64@5+ aborted_transactions?[producer_id:i64 first_offset:i64]
    preferred_read_replica:i32@11+ records:records?]]
2 ListOffsets 1-7 6
  > replica_id:i32 isolation_level:i8@2+ topics[name:str partitions[partition_index:i32
    current_leader_epoch:i32@4+ timestamp:i64]]
  < throttle_time_ms:i32@2+ topics[name:str partitions[partition_index:i32 error_code:i16
    timestamp:i64 offset:i64 leader_epoch:i32@4+]]
3 Metadata 0-12 9
  > topics?[topic_id:uuid@10+ name:str?] allow_auto_topic_creation:bool@4+
    include_cluster_authorized_operations:bool@8-10
    include_topic_authorized_operations:bool@8+
  < throttle_time_ms:i32@3+ brokers[node_id:i32 host:str port:i32 rack:str?@1+]
    cluster_id:str?@2+ controller_id:i32@1+ topics[error_code:i16 name:str?
    topic_id:uuid@10+ is_internal:bool@1+ partitions[error_code:i16 partition_index:i32
    leader_id:i32 leader_epoch:i32@7+ replica_nodes:[]i32 isr_nodes:[]i32 offline_replicas:[]i32@5+]
    topic_authorized_operations:i32@8+] cluster_authorized_operations:i32@8-10
8 OffsetCommit 2-8 8
  > group_id:str generation_id_or_member_epoch:i32 member_id:str group_instance_id:str?@7+
    retention_time_ms:i64@2-4 topics[name:str partitions[partition_index:i32
    committed_offset:i64 committed_leader_epoch:i32@6+ committed_metadata:str?]]
  < throttle_time_ms:i32@3+ topics[name:str partitions[partition_index:i32 error_code:i16]]
9 OffsetFetch 1-8 6
  > group_id:str@1-7 topics?@1-7[name:str partition_indexes:[]i32] groups@8+[group_id:str
    topics?[name:str partition_indexes:[]i32]] require_stable:bool@7+
  < throttle_time_ms:i32@3+ topics@1-7[name:str partitions[partition_index:i32
    committed_offset:i64 committed_leader_epoch:i32@5+ metadata:str? error_code:i16]]
    error_code:i16@2-7 groups@8+[group_id:str topics[name:str partitions[partition_index:i32
    committed_offset:i64 committed_leader_epoch:i32 metadata:str? error_code:i16]]
    error_code:i16]
10 FindCoordinator 0-4 3
  > key:str@0-3 key_type:i8@1+ coordinator_keys:[]str@4+
  < throttle_time_ms:i32@1+ error_code:i16@0-3 error_message:str?@1-3 node_id:i32@0-3
    host:str@0-3 port:i32@0-3 coordinators@4+[key:str node_id:i32 host:str port:i32
    error_code:i16 error_message:str?]
11 JoinGroup 0-9 6
  > group_id:str session_timeout_ms:i32 rebalance_timeout_ms:i32@1+ member_id:str
    group_instance_id:str?@5+ protocol_type:str protocols[name:str metadata:bytes]
    reason:str?@8+
  < throttle_time_ms:i32@2+ error_code:i16 generation_id:i32 protocol_type:str?@7+
    protocol_name:str? leader:str skip_assignment:bool@9+ member_id:str
    members[member_id:str group_instance_id:str?@5+ metadata:bytes]
12 Heartbeat 0-4 4
  > group_id:str generation_id:i32 member_id:str group_instance_id:str?@3+
  < throttle_time_ms:i32@1+ error_code:i16
13 LeaveGroup 0-5 4
  > group_id:str member_id:str@0-2 members@3+[member_id:str group_instance_id:str?
    reason:str?@5+]
  < throttle_time_ms:i32@1+ error_code:i16 members@3+[member_id:str group_instance_id:str?
    error_code:i16]
14 SyncGroup 0-5 4
  > group_id:str generation_id:i32 member_id:str group_instance_id:str?@3+
    protocol_type:str?@5+ protocol_name:str?@5+ assignments[member_id:str assignment:bytes]
  < throttle_time_ms:i32@1+ error_code:i16 protocol_type:str?@5+ protocol_name:str?@5+
    assignment:bytes
15 DescribeGroups 0-5 5
  > groups:[]str include_authorized_operations:bool@3+
  < throttle_time_ms:i32@1+ groups[error_code:i16 group_id:str group_state:str
    protocol_type:str protocol_data:str members[member_id:str group_instance_id:str?@4+
    client_id:str client_host:str member_metadata:bytes member_assignment:bytes]
    authorized_operations:i32@3+]
16 ListGroups 0-5 3
  > states_filter:[]str@4+ types_filter:[]str@5+
  < throttle_time_ms:i32@1+ error_code:i16 groups[group_id:str protocol_type:str
    group_state:str@4+ group_type:str@5+]
17 SaslHandshake 1-1 none
  > mechanism:str
  < error_code:i16 mechanisms:[]str
18 ApiVersions 0-3 3
  > client_software_name:str@3+ client_software_version:str@3+
  < error_code:i16 api_keys[api_key:i16 min_version:i16 max_version:i16]
    throttle_time_ms:i32@1+
19 CreateTopics 2-6 5
  > topics[name:str num_partitions:i32 replication_factor:i16
    assignments[partition_index:i32 broker_ids:[]i32] configs[name:str value:str?]]
    timeout_ms:i32 validate_only:bool
  < throttle_time_ms:i32 topics[name:str error_code:i16 error_message:str?
    num_partitions:i32@5+ replication_factor:i16@5+ configs?@5+[name:str value:str?
    read_only:bool config_source:i8 is_sensitive:bool]]
20 DeleteTopics 1-5 4
  > topic_names:[]str timeout_ms:i32
  < throttle_time_ms:i32 responses[name:str error_code:i16 error_message:str?@5+]
21 DeleteRecords 0-2 2
  > topics[name:str partitions[partition_index:i32 offset:i64]] timeout_ms:i32
  < throttle_time_ms:i32 topics[name:str partitions[partition_index:i32 low_watermark:i64
    error_code:i16]]
22 InitProducerId 0-4 2
  > transactional_id:str? transaction_timeout_ms:i32 producer_id:i64@3+
    producer_epoch:i16@3+
  < throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16
24 AddPartitionsToTxn 0-3 3
  > transactional_id:str producer_id:i64 producer_epoch:i16 topics[name:str
    partitions:[]i32]
  < throttle_time_ms:i32 results_by_topic[name:str results_by_partition[partition_index:i32
    partition_error_code:i16]]
25 AddOffsetsToTxn 0-3 3
  > transactional_id:str producer_id:i64 producer_epoch:i16 group_id:str
  < throttle_time_ms:i32 error_code:i16
26 EndTxn 0-3 3
  > transactional_id:str producer_id:i64 producer_epoch:i16 committed:bool
  < throttle_time_ms:i32 error_code:i16
27 WriteTxnMarkers 1-1 1
  > markers[producer_id:i64 producer_epoch:i16 transaction_result:bool topics[name:str
    partition_indexes:[]i32] coordinator_epoch:i32]
  < markers[producer_id:i64 topics[name:str partitions[partition_index:i32 error_code:i16]]]
28 TxnOffsetCommit 0-3 3
  > transactional_id:str group_id:str producer_id:i64 producer_epoch:i16
    generation_id:i32@3+ member_id:str@3+ group_instance_id:str?@3+ topics[name:str
    partitions[partition_index:i32 committed_offset:i64 committed_leader_epoch:i32@2+
    committed_metadata:str?]]
  < throttle_time_ms:i32 topics[name:str partitions[partition_index:i32 error_code:i16]]
32 DescribeConfigs 1-4 4
  > resources[resource_type:i8 resource_name:str configuration_keys:[]str?]
    include_synonyms:bool include_documentation:bool@3+
  < throttle_time_ms:i32 results[error_code:i16 error_message:str? resource_type:i8
    resource_name:str configs[name:str value:str? read_only:bool config_source:i8
    is_sensitive:bool synonyms[name:str value:str? source:i8] config_type:i8@3+
    documentation:str?@3+]]
33 AlterConfigs 0-2 2
  > resources[resource_type:i8 resource_name:str configs[name:str value:str?]]
    validate_only:bool
  < throttle_time_ms:i32 responses[error_code:i16 error_message:str? resource_type:i8
    resource_name:str]
36 SaslAuthenticate 0-2 2
  > auth_bytes:bytes
  < error_code:i16 error_message:str? auth_bytes:bytes session_lifetime_ms:i64@1+
37 CreatePartitions 0-3 2
  > topics[name:str count:i32 assignments?[broker_ids:[]i32]] timeout_ms:i32
    validate_only:bool
  < throttle_time_ms:i32 results[name:str error_code:i16 error_message:str?]
42 DeleteGroups 0-2 2
  > groups_names:[]str
  < throttle_time_ms:i32 results[group_id:str error_code:i16]
44 IncrementalAlterConfigs 0-1 1
  > resources[resource_type:i8 resource_name:str configs[name:str config_operation:i8
    value:str?]] validate_only:bool
  < throttle_time_ms:i32 responses[error_code:i16 error_message:str? resource_type:i8
    resource_name:str]
47 OffsetDelete 0-0 none
  > group_id:str topics[name:str partitions[partition_index:i32]]
  < error_code:i16 throttle_time_ms:i32 topics[name:str partitions[partition_index:i32
    error_code:i16]]
60 DescribeCluster 0-1 0
  > include_cluster_authorized_operations:bool endpoint_type:i8@1+
  < throttle_time_ms:i32 error_code:i16 error_message:str? endpoint_type:i8@1+
    cluster_id:str controller_id:i32 brokers[broker_id:i32 host:str port:i32 rack:str?]
    cluster_authorized_operations:i32
61 DescribeProducers 0-0 0
  > topics[name:str partition_indexes:[]i32]
  < throttle_time_ms:i32 topics[name:str partitions[partition_index:i32 error_code:i16
    error_message:str? active_producers[producer_id:i64 producer_epoch:i32 last_sequence:i32
    last_timestamp:i64 coordinator_epoch:i32 current_txn_start_offset:i64]]]
65 DescribeTransactions 0-0 0
  > transactional_ids:[]str
  < throttle_time_ms:i32 transaction_states[error_code:i16 transactional_id:str
    transaction_state:str transaction_timeout_ms:i32 transaction_start_time_ms:i64
    producer_id:i64 producer_epoch:i16 topics[topic:str partitions:[]i32]]
66 ListTransactions 0-1 0
  > state_filters:[]str producer_id_filters:[]i64 duration_filter:i64@1+
  < throttle_time_ms:i32 error_code:i16 unknown_state_filters:[]str
    transaction_states[transactional_id:str producer_id:i64 transaction_state:str]
"""


@dataclass(frozen=True)
class Field:
    """One field of a request or an answer.

    Attributes:
        kind: "i8" to "i64", "u16", "bool", "uuid", "str", "bytes", "records", or "struct".
        array: it is an array of these.
        nullable: it may be null.
        first, last: versions that have it.
        fields: of a struct.
    """

    name: str
    kind: str
    array: bool
    nullable: bool
    first: int
    last: int
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True)
class Api:
    """One kind of request.

    Attributes:
        key: its number.
        first, last: versions that are spoken.
        flexible: the first version with varints and tagged fields.
    """

    key: int
    name: str
    first: int
    last: int
    flexible: int
    request: tuple[Field, ...]
    answer: tuple[Field, ...]


_NEVER: Final = 1 << 15
_HEAD: Final = re.compile(r"(\d+) (\w+) (\d+)-(\d+) (\d+|none)")
_PART: Final = re.compile(r"(\w+)(\?)?(?::(\[\])?(\w+)(\?)?)?(?:@(\d+)(\+|-\d+)?)?(\[)?|(\])")


def _fields(text: str, first: int, last: int) -> tuple[Field, ...]:
    """Fields of one side of a table; those of structs have the versions of the struct."""
    parts = _PART.finditer(text)

    def level(first: int, last: int) -> tuple[Field, ...]:
        found = []
        for part in parts:
            name, null, array, kind, also_null, since, until, struct, end = part.groups()
            if end:
                break
            low, high = first, last
            if since:
                low = int(since)
                high = last if until == "+" else int(until[1:] if until else since)
            inner = level(low, high) if struct else ()
            found.append(
                Field(
                    name,
                    kind or "struct",
                    bool(array or struct),
                    bool(null or also_null),
                    low,
                    high,
                    inner,
                )
            )
        return tuple(found)

    return level(first, last)


def _apis(table: str) -> dict[int, Api]:
    found = {}
    for text in re.split(r"\n(?=\d)", table.strip()):
        head, _, rest = text.partition("\n")
        match = _HEAD.fullmatch(head)
        assert match is not None, head
        key, first, last = (int(match[group]) for group in (1, 3, 4))
        request, _, answer = rest.partition("<")
        flexible = _NEVER if match[5] == "none" else int(match[5])
        sides = (_fields(each.strip(" \n>"), first, last) for each in (request, answer))
        found[key] = Api(key, match[2], first, last, flexible, *sides)
    return found


APIS: Final = _apis(_TABLE)
"""By number."""

API_VERSIONS: Final = 18


_log = logging.getLogger("txnkv.server")


class Code(IntEnum):
    """Codes of answers."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    INVALID_TOPIC = 17
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    TRANSACTIONAL_ID_NOT_FOUND = 105


class KafkaError(Exception):
    """An answer of an error code, with words for those versions that have them."""

    def __init__(self, code: Code, text: str = "") -> None:
        super().__init__(text)
        self.code = code


_CODES: Final[list[tuple[type[Exception], Code]]] = [
    (TopicNotFoundError, Code.UNKNOWN_TOPIC_OR_PARTITION),
    (OffsetOutOfRangeError, Code.OFFSET_OUT_OF_RANGE),
    (TopicExistsError, Code.TOPIC_ALREADY_EXISTS),
    (ProducerFencedError, Code.INVALID_PRODUCER_EPOCH),
    (OutOfOrderSequenceError, Code.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (AuthenticationError, Code.TOPIC_AUTHORIZATION_FAILED),
    (StorageFullError, Code.KAFKA_STORAGE_ERROR),
    (CorruptionError, Code.KAFKA_STORAGE_ERROR),
    (UnavailableError, Code.REQUEST_TIMED_OUT),
    (CommitOutcomeUnknownError, Code.REQUEST_TIMED_OUT),
    (TransactionConflictError, Code.INVALID_TXN_STATE),
    (InvalidTxnStateError, Code.INVALID_TXN_STATE),
    (TxnNotFoundError, Code.INVALID_TXN_STATE),
]


def code_of(error: Exception) -> tuple[Code, str]:
    """Return the code of an error, and what to say of it."""
    if isinstance(error, KafkaError):
        return error.code, str(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TxnkvError):
        _tell(text)
    else:
        _log.error("a request of a Kafka client failed", exc_info=error)
    return Code.UNKNOWN_SERVER_ERROR, text


@lru_cache(100)
def _tell(text: str) -> None:
    """Tell the log, once: many clients ask again and again."""
    _log.error("a request of a Kafka client failed: %s", text)
