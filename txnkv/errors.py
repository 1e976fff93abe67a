"""Every error that txnkv raises, grouped by what the caller does next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


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


class SchemaChangedError(TransactionConflictError):
    """A table was altered, and rows for its former columns cannot be committed, or read as it was
    planned. Begin again: a transaction has the columns of the time when it begins.
    """


class TransactionLockedError(RetriableError):
    """A partition lock is held by another transaction."""


class UnavailableError(RetriableError):
    """A resource of the store is short or busy for the moment. Nothing was changed."""


# -- the transaction is over or unsure -------------------------------------------------


class InvalidTxnStateError(TxnkvError):
    """The transaction is in a state that does not admit what was asked. Retriable where it was
    aborted for something that is.
    """

    _commits = False  # it is committed, or about to be


class TxnNotFoundError(TxnkvError):
    """No transaction has this id, or it ended so long ago that it was forgotten."""


class TransactionTimedOutError(InvalidTxnStateError, TimeoutError):
    """The transaction passed its timeout, or went without heartbeats, and was aborted."""


class CommitOutcomeUnknownError(TxnkvError):
    """The commit may or may not have happened: ask for the state of `txn_id`. A `flush` outside
    of a transaction is called again: it asks, and writes what is not there.

    Attributes:
        txn_id: the transaction whose `transaction_state` tells the outcome; 0: it has no id.
        ask: tells whether it happened, once the disk is well, in this process; or None.
    """

    def __init__(self, message: str, txn_id: int, ask: Callable[[], bool] | None = None) -> None:
        super().__init__(message)
        self.txn_id = txn_id
        self.ask = ask

    def __reduce__(self) -> tuple[type, tuple[str, int], dict[str, object]]:
        return type(self), (str(self), self.txn_id), vars(self) | {"ask": None}


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
    """A row with this key is there already, or another one with its values in a unique index."""


class NotFoundError(TxnkvError):
    """No row has this key."""


@dataclass(frozen=True)
class RowError:
    """One row that was refused.

    Attributes:
        op: the operation, as "insert"; of a key that two workers of a transaction wrote "delete"
            or "write", for the commit knows no more of the later one.
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
    """Some rows were refused; the rows without error stand, or wait for the commit of their
    transaction, until a `with` block rolls that back.

    Attributes:
        errors: the refused rows, in the order of the input. At most `RowErrors.KEPT` of
            them are kept; `count` says how many there were.
        count: how many rows were refused.
        txn_id: the transaction that they were written in; None outside of one.
        rolled_back: that transaction was rolled back because of this error: no row stands.
        others: says what became of the other rows, where one knows it better; else empty.
        mendable: the transaction may go on without these keys. False: two workers of it wrote
            them, and it can only be rolled back.
    """

    others = ""
    mendable = True
    KEPT = 1000

    def __init__(
        self,
        errors: Sequence[RowError],
        count: int | None = None,
        txn_id: int | None = None,
        rolled_back: bool = False,
    ) -> None:
        self.errors: list[RowError] = list(errors[: self.KEPT])
        self.count = len(errors) if count is None else count
        self.txn_id = txn_id
        self.rolled_back = rolled_back
        super().__init__(self.errors, self.count, txn_id, rolled_back)

    def note_rollback(self, txn_id: int) -> None:
        """A transaction was rolled back by who handed this error on; heeded if it is its own."""
        self.rolled_back = self.rolled_back or self.txn_id == txn_id

    def __str__(self) -> str:
        shown = "; ".join(str(error) for error in self.errors[:3])
        more = f"; and {self.count - 3} more" if self.count > 3 else ""
        advice = "Mend or leave out these keys"
        if not self.others:
            if not self.mendable:
                advice = "Give each key to one worker, and run it again"
            advice += "; .errors lists them"
        return (
            f"{self.count} row{'s' if self.count != 1 else ''} refused, {self._others}: "
            f"{shown}{more}. {advice}."
        )

    @property
    def _others(self) -> str:
        if self.others:
            return self.others
        if self.rolled_back:
            return "and the transaction was rolled back with all others"
        if not self.mendable:
            return "and the transaction can only be rolled back"
        if self.txn_id is not None:
            return "the others are in the transaction, which is still open"
        if any(error.op == "create_index" for error in self.errors):
            return "and no index was made"
        return "any others stand"

    def __reduce__(self) -> tuple[type[RowErrors], tuple[object, ...], dict[str, object]]:
        return RowErrors, (self.errors, self.count, self.txn_id, self.rolled_back), vars(self)


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


class ProducerFencedError(InvalidTxnStateError):
    """A later producer, or transaction, of the same name took over."""


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


# -- arguments -------------------------------------------------------------------------


def require_number(name: str, given: object, unit: str = "seconds", *, whole: bool = False) -> None:
    """Refuse an argument with TypeError that is no number; with `whole`, no integer."""
    if isinstance(given, bool) or not isinstance(given, Integral if whole else Real):
        raise TypeError(f"{name} is a number of {unit}, not the {type(given).__name__} {given!r}")


def as_index(name: str, given: Any) -> int:
    """Return an integer, one of numpy's too, as Python's; TypeError for anything else."""
    if given.__class__ is int:
        found: int = given
        return found
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"{name} is a number, not the {type(given).__name__} {given!r}")
    return operator.index(given)


def require_text(name: str, given: str) -> None:
    """Refuse a string with ValueError that UTF-8 cannot have: a half of a character is in it; with
    TypeError what is none.
    """
    if not isinstance(given, str):
        raise TypeError(f"{name} is a string, not the {type(given).__name__} {given!r}")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        what = f"{given[error.start]!r} at {error.start}"
        raise ValueError(f"{name} has {what}, which is no character of UTF-8") from None


def require_count(name: str, given: float, unit: str = "messages") -> None:
    """Refuse an argument with TypeError that is no number, with ValueError that is not above 0."""
    if given.__class__ is not int:
        require_number(name, given, unit, whole=unit == "messages")
    if not given > 0:
        raise ValueError(f"{name} is a number of {unit} above 0, not {given!r}")


def require_several(name: str, given: object, of: str) -> None:
    """Refuse an argument with TypeError that is no list, or the like, of several."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is a list of {of}, not the {type(given).__name__} {given!r}")


def as_names(name: str, given: Any) -> list[str]:
    """Return one name or several as a list; TypeError for anything else."""
    if isinstance(given, str):
        return [given]
    require_several(name, given, "names")
    return list(given)


def as_offsets(given: Mapping[Any, Any]) -> dict[int, int]:
    """Return offsets by partition as Python's integers; TypeError where one is no integer."""
    return {as_index("a partition", n): as_index("an offset", at) for n, at in given.items()}
