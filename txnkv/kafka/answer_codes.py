"""Kafka's error codes, and which of them an error of the store is."""

from __future__ import annotations

import logging
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
    CONCURRENT_TRANSACTIONS = 51
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
