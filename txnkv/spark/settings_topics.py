"""The settings of reads of topics, and of a table's changes; see `settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from txnkv.coordinator import Timestamp
from txnkv.errors import NotSupportedError
from txnkv.spark import settings_options as options_
from txnkv.spark.settings import Place
from txnkv.spark.settings_options import EARLIEST, Position

TABLE: Final = "table"
TOPIC: Final = "topic"
CHANGES: Final = "changes"


def what_is_read(options: Mapping[str, str]) -> str:
    """TABLE, TOPIC or CHANGES.

    Raises:
        ValueError: options table and topic are both there, or neither; changes is no flag.
    """
    found = options_.given(options)
    if "topic" in found:
        if "table" in found:
            raise ValueError("options table and topic exclude each other: give one of them")
        return TOPIC
    if "table" not in found:
        raise ValueError("option table or topic is missing: say .option('table', ...)")
    return CHANGES if options_.flag(found, "changes", False) else TABLE


@dataclass(frozen=True, kw_only=True)
class TopicRead(Place):
    """Settings of a read of a topic, batch or stream. The read sees committed messages.

    Attributes:
        columns: the projection; None for all.
        order: "offset", or "commit": whole transactions, as they were committed.
        starting: where a batch, or a new query, begins.
        ending: where a batch ends.
        max_offsets: at most about so many offsets a micro batch; None for all there are.
        fail_on_data_loss: whether messages that are gone are an error.
    """

    topic: str
    columns: tuple[str, ...] | None = None
    order: str = "offset"
    starting: Position = "earliest"
    ending: Position = "latest"
    max_offsets: int | None = None
    fail_on_data_loss: bool = True

    @classmethod
    def of_schema(cls, options: Mapping[str, str]) -> TopicRead:
        """The settings of a read of which it is not known whether it is a batch or a stream.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory, or there is a token.
        """
        known = dict.fromkeys(options_.READ_TOPIC + options_.STREAM_TOPIC)
        return cls._of(options, tuple(known), "a read of a topic")

    @classmethod
    def of_batch(cls, options: Mapping[str, str]) -> TopicRead:
        """The settings of a batch read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory, or there is a token.
        """
        made = cls._of(options, options_.READ_TOPIC, "a batch read of a topic")
        if made.starting == "latest":
            raise ValueError("a batch from startingOffsets 'latest' on reads nothing: leave it out")
        return made

    @classmethod
    def of_stream(cls, options: Mapping[str, str]) -> TopicRead:
        """The settings of a streaming read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory, or there is a token.
        """
        return cls._of(options, options_.STREAM_TOPIC, "a streaming read of a topic")

    @classmethod
    def _of(cls, options: Mapping[str, str], known: tuple[str, ...], what: str) -> TopicRead:
        _refuse_token(options, what)
        given = options_.named(options, known, what)
        path, topic = options_.place(given, "topic")
        order = given.get("order", "offset").lower()
        if order not in ("offset", "commit"):
            raise ValueError(f"order is 'offset' or 'commit', not {order!r}")
        starting = options_.position(given, "startingOffsets", "earliest")
        ending = options_.position(given, "endingOffsets", "latest")
        if ending == "earliest" or (isinstance(ending, dict) and EARLIEST in ending.values()):
            raise ValueError(
                "endingOffsets is 'latest' or offsets by partition (-1 latest), not the earliest"
            )
        return cls(
            path=path,
            topic=topic,
            columns=options_.columns(given),
            order=order,
            starting=starting,
            ending=ending,
            max_offsets=options_.positive(given, "maxOffsetsPerTrigger"),
            fail_on_data_loss=options_.flag(given, "failOnDataLoss", True),
        )


@dataclass(frozen=True, kw_only=True)
class ChangesRead(Place):
    """Settings of a stream of a table's changes.

    Attributes:
        columns: the projection of the table's columns and `_op`, `_commit_timestamp`; None for all.
        starting: "earliest": all rows, then changes; "latest"; or changes after a time.
    """

    table: str
    columns: tuple[str, ...] | None = None
    starting: str | Timestamp | datetime = "earliest"

    @classmethod
    def of_stream(cls, options: Mapping[str, str]) -> ChangesRead:
        """The settings of a streaming read.

        Raises:
            ValueError: an option is missing, unknown, or makes no sense.
            NotSupportedError: the path is no directory, or there is a token.
        """
        what = "a stream of changes"
        _refuse_token(options, what)
        given = options_.named(options, options_.STREAM_CHANGES, what)
        path, table = options_.place(given, "table")
        return cls(
            path=path,
            table=table,
            columns=options_.columns(given),
            starting=_starting(given.get("startingOffsets", "earliest")),
            history=options_.seconds(given, "history"),
        )


def _starting(text: str) -> str | Timestamp | datetime:
    text = text.strip()
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    return options_.time("startingOffsets of changes, if not 'earliest' or 'latest',", text)


def _refuse_token(options: Mapping[str, str], what: str) -> None:
    if "token" in options_.given(options):
        raise NotSupportedError(
            f"{what} sees what is committed, and joins no transaction: leave out option token"
        )
