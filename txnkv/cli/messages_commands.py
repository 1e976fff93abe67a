"""`txnkv produce` and `txnkv consume`: lines into a topic, and its messages as lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, Final, Protocol, TypeAlias, cast

import click
import pyarrow as pa

import txnkv
from txnkv.cli import message_lines, parsing
from txnkv.cli.command_group import OneTransaction, given, stopping
from txnkv.cli.console import (
    bar,
    close_bytes,
    open_bytes,
    partitions_option,
    plural,
    rate,
    stdout,
    store_argument,
    tell,
    topic_argument,
)
from txnkv.cli.message_lines import Row, TypedLines
from txnkv.cli.parsing import topic_arguments, topic_options
from txnkv.errors import TopicNotFoundError
from txnkv.topics import Start, SubscriptionOptions

# -- produce ---------------------------------------------------------------------------

Lines: TypeAlias = "pa.RecordBatch | list[Row]"
Parse = Callable[[Sequence[bytes], int], Lines]


@click.command()
@store_argument
@topic_argument
@click.argument("files", metavar="[FILE]...", nargs=-1)
@click.option("-k", "--key-separator", metavar="TEXT", help="Each line is a key, TEXT, a value.")
@click.option(
    "--json", "as_json", is_flag=True, help="Each line is a JSON object; so is the result."
)
@click.option("-p", "--partition", type=click.IntRange(min=0), help="Send all to this partition.")
@click.option(
    "--transaction", is_flag=True, help="All lines are one transaction, seen when it has them all."
)
@click.option(
    "--partitions", type=click.IntRange(min=1), help="Make the topic, if missing, with so many."
)
@topic_options("Of a topic to be made: ")
def produce(
    store: str,
    topic: str,
    files: tuple[str, ...],
    key_separator: str | None,
    as_json: bool,
    partition: int | None,
    transaction: bool,
    partitions: int | None,
    **options: Any,
) -> None:
    """Send lines to TOPIC, each a message. Reads stdin, or FILEs.

    Lines are sent as they come, as many in one transaction as are there, and are durable when
    they are. JSON lines are objects: {"value": "v", "key": "k", "headers": [["name", "text"]],
    "timestamp": "2026-01-31T12:00:00Z", "partition": 0}, all but value may be left out, bytes that
    are no text are {"base64": "..."}. `txnkv consume --json` writes such lines.

    Where the topic has a value schema, values are JSON in every form: a line, or what is behind
    the key, is an object of the columns, {"id": 7, "note": "n"}.
    """
    if as_json and key_separator is not None:
        raise click.UsageError("--json and --key-separator exclude each other")
    if key_separator == "":
        raise click.UsageError("--key-separator is empty; leave it out to send values alone")
    started = time.perf_counter()
    done = _Produce(store, transaction)
    with (
        stopping(done.stopped),
        txnkv.connect(store, create=partitions is not None) as client,
    ):
        target = _target(client, topic, partitions, options)
        if partition is not None and partition >= target.partitions:
            raise click.UsageError(
                f"topic {topic!r} has no partition {partition}: it has {target.partitions}, "
                f"numbered from 0 to {target.partitions - 1}"
            )
        parse = _parser(target, as_json, key_separator, partition)
        done.run(client, target, _messages(files or ("-",), parse))
        seconds, sent = time.perf_counter() - started, done.sent
        # A rate of what somebody types says nothing.
        fast = f" in {seconds:.2f} s, {rate(sent, seconds, 'message')}" if sent > 1000 else ""
        tell(
            as_json,
            {"topic": topic, "sent": sent, "seconds": round(seconds, 6)},
            f"sent {plural(sent, 'message')} to {topic}{fast}",
        )


def _target(
    client: txnkv.Client, name: str, partitions: int | None, options: dict[str, Any]
) -> txnkv.Topic:
    try:
        return client.topic(name)
    except TopicNotFoundError as error:
        if partitions is None:
            raise ValueError(f"{error}; or give --partitions N to make it") from None
    with given():
        return client.create_topic(
            name, partitions=partitions, exists_ok=True, **topic_arguments(**options)
        )


def _parser(
    topic: txnkv.Topic, as_json: bool, key_separator: str | None, partition: int | None
) -> Parse:
    typed = topic.value_schema is not None
    forms = TypedLines(topic) if typed else message_lines
    parse: Callable[[Sequence[bytes], int], Any] = forms.plain
    if as_json:
        parse = forms.from_json
    elif key_separator is not None:
        parse = partial(forms.with_keys, separator=message_lines.unescaped(key_separator))
    return partial(_rows if typed else _batch, parse, partition)


def _batch(parse: Any, partition: int | None, lines: Sequence[bytes], first: int) -> Lines:
    columns = parse(lines, first)
    if partition is not None:
        columns["partition"] = pa.array([partition] * len(columns["value"]), pa.int32())
    return pa.record_batch(columns)


def _rows(parse: Any, partition: int | None, lines: Sequence[bytes], first: int) -> Lines:
    rows: list[Row] = parse(lines, first)
    return rows if partition is None else [row._replace(partition=partition) for row in rows]


def _messages(files: Sequence[str], parse: Parse) -> Iterator[Lines]:
    for name in files:
        number = 1
        with _opened(name) as stream:
            for lines in message_lines.read_lines(stream):
                try:
                    found = parse(lines, number)
                except ValueError as error:
                    raise ValueError(f"{'stdin' if name == '-' else name}: {error}") from None
                number += len(lines)
                if len(found):
                    yield found


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    file = open_bytes(name)
    try:
        yield file
    finally:
        close_bytes(file)


class _Produce:
    """Sends messages, in one transaction or as they come.

    Attributes:
        sent: how many, so far.
    """

    def __init__(self, store: str, together: bool) -> None:
        self.sent = 0
        self._one = OneTransaction(store, "sent") if together else None

    def run(self, client: txnkv.Client, topic: txnkv.Topic, messages: Iterator[Lines]) -> None:
        """Send them all."""
        way: AbstractContextManager[txnkv.Transaction | txnkv.Session]
        way = client.new_session() if self._one is None else self._one.begin(client)
        with bar() as progress, way as to:
            task = progress.add_task(topic.name, total=None, note="")
            for some in messages:
                if isinstance(some, list):
                    for row in some:
                        to.send(topic, *row)
                else:
                    to.send_batch(topic, some)
                to.flush()
                self.sent += len(some)
                progress.update(task, note=plural(self.sent, "message"))

    def stopped(self) -> str:
        """Tell what is durable after Ctrl-C."""
        some = plural(self.sent, "message")
        if self._one is None:
            return f"at least {some} sent"
        self._one.wrote = some
        return self._one.stopped()


# -- consume ---------------------------------------------------------------------------

_ROUND: Final = 5000
_LARGE_ROUND: Final = 40_000
"""The same for batches, whose bytes are bounded by the consumer."""
Messages: TypeAlias = "list[txnkv.Message] | pa.RecordBatch"
_PLACES: Final = ("earliest", "latest")


@click.command()
@store_argument
@topic_argument
@click.option("-f", "--follow", is_flag=True, help="Wait for more at the end, until Ctrl-C.")
@click.option(
    "--from",
    "start",
    metavar="WHERE",
    default="earliest",
    show_default=True,
    help="earliest, latest, an offset, or a time with its zone.",
)
@partitions_option
@click.option("-n", "--limit", type=click.IntRange(min=0), help="At most so many messages.")
@click.option("-k", "--key-separator", metavar="TEXT", help="Write keys, too: key, TEXT, value.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON lines: all of each message.")
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted", "serializable"]),
    default="read_committed",
    show_default=True,
    help="serializable: transactions whole and in the order of their commits.",
)
@click.option(
    "--order",
    type=click.Choice(["offset", "commit"]),
    default="offset",
    show_default=True,
    help="commit: as transactions were committed, behind none that is open.",
)
@click.option(
    "-s",
    "--subscription",
    metavar="NAME",
    help="Go on where NAME is, acknowledging what was written; it is made when missing.",
)
@click.option("--shared", is_flag=True, help="The subscription is a shared one.")
def consume(
    store: str,
    topic: str,
    follow: bool,
    start: str,
    partitions: tuple[int, ...],
    limit: int | None,
    key_separator: str | None,
    as_json: bool,
    isolation: str,
    order: str,
    subscription: str | None,
    shared: bool,
) -> None:
    """Write the messages of TOPIC to stdout, a line each.

    Ends with what is there, or goes on with --follow. What an open transaction holds back is not
    there yet: `txnkv topics STORE TOPIC` shows for which it waits.

    With --subscription, a message that was written and not yet acknowledged when the program
    died is written again.
    """
    if as_json and key_separator is not None:
        raise click.UsageError("--json and --key-separator exclude each other")
    if subscription is None and shared:
        raise click.UsageError("--shared is for --subscription NAME")
    separator = None if key_separator is None else message_lines.unescaped(key_separator)
    # To find a time, what waits in memory is written to the log.
    read_only = subscription is None and (start in _PLACES or start.isdecimal())
    with txnkv.connect(store, create=False, read_only=read_only) as client:
        found = client.topic(topic)
        typed = found.value_schema is not None
        reader: Rounds
        with given():
            if subscription is None:
                reader = _Reader(found, start, partitions, isolation, order, follow)
            else:
                way = _way_of_subscription(isolation, order)
                reader = _Member(found, subscription, shared, start, partitions, follow, way)
        file = stdout()
        with (
            closing(reader),
            stopping(reader.durable),
            ThreadPoolExecutor(2, "txnkv-json") as pool,
        ):
            for messages in _limited(reader, limit):
                parts = _halves(messages)
                lines = partial(
                    message_lines.lines_of, separator=separator, as_json=as_json, typed=typed
                )
                for text in map(lines, parts) if len(parts) == 1 else pool.map(lines, parts):
                    file.write(text)
                file.flush()
                reader.written(messages)


def _halves(messages: Messages) -> list[Messages]:
    """Two halves of a large batch, which two threads make lines of."""
    if isinstance(messages, list) or len(messages) < _ROUND:
        return [messages]
    half = len(messages) // 2
    return [messages.slice(0, half), messages.slice(half)]


def _limited(reader: Rounds, limit: int | None) -> Iterator[Messages]:
    left = limit
    while left is None or left > 0:
        messages = reader.next(reader.most if left is None else min(left, reader.most))
        if messages is None:
            return
        if len(messages):
            yield messages
        if left is not None:
            left -= len(messages)


class Rounds(Protocol):
    """Messages in rounds: None at the end.

    Attributes:
        most: messages of a round.
    """

    most: int

    def next(self, most: int) -> Messages | None:
        """At most so many, perhaps none; None when there is nothing more."""

    def written(self, messages: Messages) -> None:
        """Note that messages are on their way to the reader of the output."""

    def durable(self) -> str:
        """Say what stays of the reading after Ctrl-C."""

    def close(self) -> None:
        """Give up the place from which it reads."""


class _Reader:
    """Rounds by a consumer of the command's own."""

    def __init__(
        self,
        topic: txnkv.Topic,
        start: str,
        partitions: tuple[int, ...],
        isolation: str,
        order: str,
        follow: bool,
    ) -> None:
        chosen = sorted(set(partitions)) or list(range(topic.partitions))
        options: dict[str, Any] = {"isolation": isolation, "order": order}
        begin, when = _place(start, chosen)
        self._consumer = topic.consumer(start=begin, partitions=chosen, **options)
        if when is not None:
            self._consumer.seek_to_time(when)
        self._follow = follow
        self.most = _LARGE_ROUND

    def next(self, most: int) -> Messages | None:
        if self._follow:
            return self._consumer.poll_batch(max_messages=most, timeout=1.0)
        before = self._positions()
        messages = self._consumer.poll_batch(max_messages=most, timeout=0)
        # A round may have passed over aborted messages alone; there may be more behind them.
        return messages if len(messages) or before != self._positions() else None

    def written(self, messages: Messages) -> None:
        """Nothing to be noted: the next run begins where it is told to."""

    def durable(self) -> str:
        return "reading changes nothing"

    def close(self) -> None:
        self._consumer.close()

    def _positions(self) -> list[int]:
        return [self._consumer.position(number) for number in self._consumer.partitions]


class _Member:
    """Rounds by a subscription; messages that were written are acknowledged together."""

    def __init__(
        self,
        topic: txnkv.Topic,
        name: str,
        shared: bool,
        start: str,
        partitions: tuple[int, ...],
        follow: bool,
        way: SubscriptionOptions,
    ) -> None:
        begin, when = _place(start, list(partitions) or list(range(topic.partitions)))
        if when is not None:
            raise click.UsageError("--from takes no time with --subscription")
        self._subscription = topic.subscribe(
            name,
            type="shared" if shared else "exclusive",
            start=begin,
            partitions=sorted(set(partitions)) or None,
            **way,
        )
        self._timeout = 1.0 if follow else 0.0
        self._follow = follow
        self._acknowledged = 0
        self.most = _ROUND

    def next(self, most: int) -> list[txnkv.Message] | None:
        messages = self._subscription.receive_many(max_messages=most, timeout=self._timeout)
        return messages or ([] if self._follow else None)

    def written(self, messages: Messages) -> None:
        assert isinstance(messages, list)
        self._subscription.ack(messages)
        self._acknowledged += len(messages)

    def durable(self) -> str:
        return f"at least {plural(self._acknowledged, 'message')} acknowledged; others come again"

    def close(self) -> None:
        self._subscription.close()


def _way_of_subscription(isolation: str, order: str) -> SubscriptionOptions:
    """Return the options that were given; those that were not stay as they are."""
    context, found = click.get_current_context(), {"isolation": isolation, "order": order}
    given_here = {
        name: value
        for name, value in found.items()
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    return cast(SubscriptionOptions, given_here)


def _place(text: str, partitions: list[int]) -> tuple[Start | dict[int, int], datetime | None]:
    """Return where a consumer is to begin, and a time for it to seek to, or None.

    Raises:
        ValueError: `text` is no place, no offset and no time with a zone.
    """
    if text in _PLACES:
        return cast(Start, text), None
    if text.isdecimal():
        return dict.fromkeys(partitions, int(text)), None
    return "earliest", parsing.zoned(text, "--from", "neither earliest, latest, an offset nor")
