"""`txnkv produce`: lines into a topic."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeAlias

import click
import pyarrow as pa

import txnkv
from txnkv.cli import message_lines
from txnkv.cli.command_group import stopping
from txnkv.cli.console import bar, plural, rate, store_argument, tell, topic_argument
from txnkv.cli.message_lines import Row, TypedLines
from txnkv.cli.parsing import topic_arguments, topic_options
from txnkv.errors import TopicNotFoundError

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
    with txnkv.connect(store, create=partitions is not None) as client:
        target = _target(client, topic, partitions, options)
        if partition is not None and partition >= target.partitions:
            raise click.UsageError(
                f"topic {topic!r} has no partition {partition}: it has {target.partitions}, "
                f"numbered from 0 to {target.partitions - 1}"
            )
        parse = _parser(target, as_json, key_separator, partition)
        messages = _messages(files or ("-",), parse)
        sent = _send_all(client, target, messages, transaction)
    seconds = time.perf_counter() - started
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
    if name == "-":
        yield sys.stdin.buffer
        return
    with open(name, "rb") as file:
        yield file


def _send_all(
    client: txnkv.Client, topic: txnkv.Topic, messages: Iterator[Lines], together: bool
) -> int:
    sent = 0
    # No timeout: it lives as long as this process sends heartbeats.
    to = client.new_transaction(timeout=None) if together else client.new_session()

    def durable() -> str:
        undone = isinstance(to, txnkv.Transaction) and to.state is not txnkv.TxnState.COMMITTED
        return "nothing was sent" if undone else f"at least {plural(sent, 'message')} sent"

    with stopping(durable), bar() as progress, to:
        task = progress.add_task(topic.name, total=None, note="")
        for some in messages:
            if isinstance(some, list):
                for row in some:
                    to.send(topic, *row)
            else:
                to.send_batch(topic, some)
            to.flush()
            sent += len(some)
            progress.update(task, note=plural(sent, "message"))
    return sent
