"""Every error that txnkv raises, grouped by what the caller does next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TxnkvError(Exception):
    """Base of all errors of the library.

    Attributes:
        retriable: True when running the whole transaction again may succeed.
    """

    retriable: bool = False


# -- run it again ----------------------------------------------------------------------


class RetriableError(TxnkvError):
    """Base of the errors after which the same work may succeed when run again."""

    retriable = True


class TransactionConflictError(RetriableError):
    """Another transaction committed first what this one wrote. This one was aborted."""


class TransactionLockedError(RetriableError):
    """A partition lock is held by another transaction."""


class UnavailableError(RetriableError):
    """A resource of the store is short or busy for the moment. Nothing was changed."""


# -- the transaction is over or unsure -------------------------------------------------


class InvalidTxnStateError(TxnkvError):
    """The transaction is in a state that does not admit what was asked."""


class TxnNotFoundError(TxnkvError):
    """No transaction has this id, or it ended so long ago that it was forgotten."""


class TransactionTimedOutError(InvalidTxnStateError, TimeoutError):
    """The transaction passed its timeout, or went without heartbeats, and was aborted."""


class CommitOutcomeUnknownError(TxnkvError):
    """The commit may or may not have happened: ask for the state of `txn_id`.

    Attributes:
        txn_id: the transaction whose `transaction_state` tells the outcome.
    """

    def __init__(self, message: str, txn_id: int) -> None:
        super().__init__(message)
        self.txn_id = txn_id


class InvalidTokenError(TxnkvError):
    """A token is forged, altered, of another store, of another format or expired."""


class AuthenticationError(TxnkvError):
    """The server refused the credentials."""


class AckConflictError(TransactionConflictError):
    """Another transaction acknowledged the message first. This one was aborted."""

    retriable = False


class AlreadyAppliedError(TransactionConflictError):
    """This version of an application, or a later one, is committed. This one was aborted."""

    retriable = False


# -- mend the input --------------------------------------------------------------------


class SchemaError(TxnkvError):
    """Data, a column or a schema does not fit the table."""


class AlreadyPresentError(TxnkvError):
    """A row with this key is there already."""


class NotFoundError(TxnkvError):
    """No row has this key."""


@dataclass(frozen=True)
class RowError:
    """One row that was refused.

    Attributes:
        op: the operation, as "insert".
        table: the table's name.
        key: the row's primary key: a scalar, or a tuple for a composite key.
        error: why, as an `AlreadyPresentError` or `NotFoundError`.
    """

    op: str
    table: str
    key: object
    error: TxnkvError

    def __str__(self) -> str:
        return f"{self.op} into {self.table!r}, key {self.key!r}: {self.error}"


class RowErrors(TxnkvError):
    """Some rows were refused; the rows without error stand.

    Attributes:
        errors: the refused rows, in the order of the input. At most `RowErrors.KEPT` of
            them are kept; `count` says how many there were.
        count: how many rows were refused.
    """

    KEPT = 1000

    def __init__(self, errors: Sequence[RowError], count: int | None = None) -> None:
        self.errors: list[RowError] = list(errors[: self.KEPT])
        self.count = len(errors) if count is None else count
        shown = "; ".join(str(error) for error in self.errors[:3])
        more = f"; and {self.count - 3} more" if self.count > 3 else ""
        super().__init__(
            f"{self.count} row{'s' if self.count != 1 else ''} refused, the others stand: "
            f"{shown}{more}. Mend or leave out these keys; .errors lists them."
        )

    def __reduce__(self) -> tuple[type[RowErrors], tuple[list[RowError], int]]:
        return (RowErrors, (self.errors, self.count))


class TableExistsError(TxnkvError):
    """A table of this name exists already."""


class TableNotFoundError(TxnkvError):
    """No table has this name."""


class TopicExistsError(TxnkvError):
    """A topic of this name exists already."""


class TopicNotFoundError(TxnkvError):
    """No topic has this name."""


class NotSupportedError(TxnkvError):
    """This version cannot do what was asked."""


class OffsetOutOfRangeError(TxnkvError):
    """The offset is outside of the log."""


class HistoryExpiredError(TxnkvError):
    """The snapshot is older than the history that the store keeps."""


class ProducerFencedError(TxnkvError):
    """A later producer of the same name took over."""


class OutOfOrderSequenceError(TxnkvError):
    """A producer's sequence number leaves a gap."""


# -- mend the store --------------------------------------------------------------------


class StoreNotFoundError(TxnkvError):
    """No store is at this path."""


class IncompatibleStoreError(TxnkvError):
    """The store is of a format, or the machine has a library, that this version refuses."""


class CorruptionError(TxnkvError):
    """Stored bytes do not match their checksum or make no sense. No data is returned."""


class StorageFullError(TxnkvError):
    """The disk is full or a size limit was hit. What was acknowledged is kept."""


class ClosedError(TxnkvError):
    """The client, session or transaction handle was closed."""
