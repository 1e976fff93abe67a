"""`txnkv produce`: lines into a topic."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import click
import pyarrow as pa

import txnkv
from txnkv.cli import message_lines
from txnkv.cli.console import bar, plural, print_json, rate, store_argument
from txnkv.errors import TopicNotFoundError

Parse = Callable[[Sequence[bytes], int], dict[str, Any]]


@click.command()
@store_argument
@click.argument("topic", metavar="TOPIC")
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
@click.option(
    "--buffer",
    type=click.Choice(["marker", "sidecar"]),
    default="marker",
    show_default=True,
    help="Of a topic to be made: where messages of open transactions wait.",
)
@click.option(
    "--compression",
    type=click.Choice(["none", "lz4", "zstd"]),
    default="none",
    show_default=True,
    help="Of a topic to be made.",
)
def produce(
    store: str,
    topic: str,
    files: tuple[str, ...],
    key_separator: str | None,
    as_json: bool,
    partition: int | None,
    transaction: bool,
    partitions: int | None,
    buffer: str,
    compression: str,
) -> None:
    """Send lines to TOPIC, each a message. Reads stdin, or FILEs.

    Lines are sent as they come, as many in one transaction as are there, and are durable when
    they are. JSON lines are objects: {"value": "v", "key": "k", "headers": [["name", "text"]],
    "timestamp": "2026-01-31T12:00:00Z", "partition": 0}, all but value may be left out, bytes that
    are no text are {"base64": "..."}. `txnkv consume --json` writes such lines.
    """
    if as_json and key_separator is not None:
        raise click.UsageError("--json and --key-separator exclude each other")
    if key_separator == "":
        raise click.UsageError("--key-separator is empty; leave it out to send values alone")
    started = time.perf_counter()
    with txnkv.connect(store, create=partitions is not None) as client:
        target = _target(client, topic, partitions, buffer, compression)
        if partition is not None and partition >= target.partitions:
            raise ValueError(
                f"topic {topic!r} has no partition {partition}: it has {target.partitions}, "
                f"numbered from 0 to {target.partitions - 1}"
            )
        messages = _messages(files or ("-",), _parser(as_json, key_separator), partition)
        sent = _send_all(client, target, messages, transaction)
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"topic": topic, "sent": sent, "seconds": round(seconds, 6)})
    else:
        # A rate of what somebody types says nothing.
        fast = f" in {seconds:.2f} s, {rate(sent, seconds, 'message')}" if sent > 1000 else ""
        click.echo(f"sent {plural(sent, 'message')} to {topic}{fast}")


def _target(
    client: txnkv.Client, name: str, partitions: int | None, buffer: str, compression: str
) -> txnkv.Topic:
    try:
        return client.topic(name)
    except TopicNotFoundError as error:
        if partitions is None:
            raise ValueError(f"{error}; or give --partitions N to make it") from None
    codec = None if compression == "none" else compression
    return client.create_topic(
        name, partitions=partitions, buffer=buffer, compression=codec, exists_ok=True
    )


def _parser(as_json: bool, key_separator: str | None) -> Parse:
    if as_json:
        return message_lines.from_json
    if key_separator is not None:
        return partial(message_lines.with_keys, separator=_unescaped(key_separator))
    return message_lines.plain


def _unescaped(text: str) -> bytes:
    """A tab is hard to type in a shell."""
    return text.replace("\\t", "\t").encode()


def _messages(
    files: Sequence[str], parse: Parse, partition: int | None
) -> Iterator[pa.RecordBatch]:
    for name in files:
        number = 1
        with _opened(name) as stream:
            for lines in message_lines.read_lines(stream):
                try:
                    columns = parse(lines, number)
                except ValueError as error:
                    raise ValueError(f"{'stdin' if name == '-' else name}: {error}") from None
                number += len(lines)
                if partition is not None:
                    count = len(columns["value"])
                    columns["partition"] = pa.array([partition] * count, pa.int32())
                if len(columns["value"]):
                    yield pa.record_batch(columns)


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with open(name, "rb") as file:
        yield file


def _send_all(
    client: txnkv.Client, topic: txnkv.Topic, messages: Iterator[pa.RecordBatch], together: bool
) -> int:
    sent = 0
    with bar() as progress:
        task = progress.add_task(topic.name, total=None, note="")

        def send(to: txnkv.Transaction | txnkv.Session) -> None:
            nonlocal sent
            for batch in messages:
                to.send_batch(topic, batch)
                to.flush()
                sent += batch.num_rows
                progress.update(task, note=plural(sent, "message"))

        if together:
            # No timeout: it lives as long as this process sends heartbeats.
            with client.transaction(timeout=None) as txn:
                send(txn)
        else:
            with client.new_session() as session:
                send(session)
    return sent
