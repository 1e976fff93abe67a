"""`txnkv topics`: topics, their partitions, who holds them back, how far subscriptions are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
import pyarrow as pa

import txnkv
from txnkv.cli.console import (
    duration,
    json_option,
    plural,
    print_grid,
    print_json,
    size,
    store_argument,
)
from txnkv.topics import PartitionOverview, TopicOverview, overview

_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)


@click.command()
@store_argument
@click.argument("topic", metavar="[TOPIC]", required=False)
@json_option
def topics(store: str, topic: str | None, as_json: bool) -> None:
    """List the topics; or the partitions and subscriptions of TOPIC.

    Offsets are counted from the start of each partition to its end, with those that end
    transactions. What lies at or above the stable offset of a partition waits for an open
    transaction; the output says for which, and how to end it.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        engine = client.instance.topics
        names = client.topics() if topic is None else [client.topic(topic).name]
        found = [overview.look(engine, engine.get(name)) for name in names]
    if as_json:
        documents = [_document(each) for each in found]
        print_json(documents if topic is None else documents[0])
    elif topic is not None:
        _print_topic(store, found[0])
    elif not found:
        click.echo("no topics")
    else:
        print_grid(
            ["topic", "buffer", "partitions", "offsets", "size", "open", "lag"],
            [_cells(each) for each in found],
            right=["partitions", "offsets", "size", "open"],
        )
        _print_holders(store, found)
        _print_damage(store, found)


def _cells(found: TopicOverview) -> list[str]:
    return [
        found.topic.name,
        found.topic.buffer,
        str(len(found.partitions)),
        f"{sum(each.end - each.start for each in found.partitions):,}",
        size(sum(each.bytes for each in found.partitions)),
        str(len(_open(found))),
        ", ".join(f"{each.name} {sum(each.lag.values()):,}" for each in found.subscriptions),
    ]


def _open(found: TopicOverview) -> set[int]:
    logs = {txn.txn_id for each in found.partitions for txn in each.open}
    return logs | {txn_id for each in found.partitions for txn_id in each.waiting}


def _print_topic(store: str, found: TopicOverview) -> None:
    options = found.topic.options
    kept = [
        f"{duration(options.retention_seconds)}" if options.retention_seconds else "",
        size(options.retention_bytes) if options.retention_bytes else "",
    ]
    unacknowledged = ", and what is not acknowledged" if options.retain_unacknowledged else ""
    click.echo(
        f"{found.topic.name}: {found.topic.buffer} buffer, "
        f"compression {options.compression or 'none'}, "
        f"keeps {' and '.join(filter(None, kept)) or 'everything'}{unacknowledged}"
    )
    if options.codec is not None:
        click.echo(f"values: {options.codec.described}")
    click.echo()
    print_grid(
        ["partition", "start", "end", "stable", "size", "open", "held back by"],
        [_partition_cells(each) for each in found.partitions],
        right=["partition", "start", "end", "stable", "size", "open"],
    )
    if found.subscriptions:
        click.echo()
        print_grid(
            ["subscription", "type", "lag", "by partition", "lost"],
            [
                [
                    each.name,
                    each.type,
                    f"{sum(each.lag.values()):,}",
                    ", ".join(f"{number}: {lag:,}" for number, lag in each.lag.items()),
                    f"{sum(each.lost.values()):,}",
                ]
                for each in found.subscriptions
            ],
            right=["lag", "lost"],
        )
    _print_holders(store, [found])
    _print_damage(store, [found])


def _partition_cells(each: PartitionOverview) -> list[str]:
    holder = each.held_by
    if each.error is not None:
        return [str(each.number), *["?"] * 5, "damaged"]
    return [
        str(each.number),
        str(each.start),
        str(each.end),
        str(each.last_stable_offset),
        size(each.bytes),
        str(len(each.open) + len(each.waiting)),
        "" if holder is None else f"transaction {holder.txn_id}",
    ]


def _print_damage(store: str, found: list[TopicOverview]) -> None:
    """Print the partitions that cannot be looked at, and what to do."""
    for topic in found:
        for each in topic.partitions:
            if each.error is not None:
                click.echo(
                    f"\n{topic.topic.name}/{each.number} is damaged: {each.error}. All else goes "
                    f"on; for more: txnkv check {store}"
                )


def _print_holders(store: str, found: list[TopicOverview]) -> None:
    """Print the transactions that readers of committed messages wait for, and how to end them."""
    holders: dict[int, list[tuple[str, PartitionOverview]]] = {}
    for topic in found:
        for each in topic.partitions:
            if each.held_by is not None:
                holders.setdefault(each.held_by.txn_id, []).append((topic.topic.name, each))
    for txn_id, places in sorted(holders.items()):
        where = ", ".join(
            f"{name}/{each.number} at {each.last_stable_offset}" for name, each in places
        )
        waiting = sum(each.end - each.last_stable_offset for _, each in places)
        since = min(each.held_by.since for _, each in places if each.held_by is not None)
        age = (datetime.now(UTC) - (_UNIX + timedelta(microseconds=since))).total_seconds()
        click.echo(
            f"\ntransaction {txn_id} holds back {where}, with {plural(waiting, 'offset')} there, "
            f"since {duration(max(age, 0))}; if nobody will end it: "
            f"txnkv txn abort {store} {txn_id}"
        )


def _document(found: TopicOverview) -> dict[str, Any]:
    options = found.topic.options
    return {
        "name": found.topic.name,
        "buffer": found.topic.buffer,
        "compression": options.compression,
        "retention_seconds": options.retention_seconds,
        "retention_bytes": options.retention_bytes,
        "retain_unacknowledged": options.retain_unacknowledged,
        "value_schema": _columns(options.value_schema),
        "partitions": [_partition_document(each) for each in found.partitions],
        "subscriptions": [
            {
                "name": each.name,
                "type": each.type,
                "lag": sum(each.lag.values()),
                "lag_by_partition": list(each.lag.values()),
                "lost": sum(each.lost.values()),
            }
            for each in found.subscriptions
        ],
    }


def _columns(schema: pa.Schema | None) -> dict[str, str] | None:
    if schema is None:
        return None
    return {each.name: f"{each.type}{'?' if each.nullable else ''}" for each in schema}


def _partition_document(each: PartitionOverview) -> dict[str, Any]:
    holder = each.held_by
    return {
        "partition": each.number,
        "start": each.start,
        "end": each.end,
        "last_stable_offset": each.last_stable_offset,
        "bytes": each.bytes,
        "held_back_by": None if holder is None else holder.txn_id,
        "error": each.error,
        "open": [
            {"id": txn.txn_id, "first_offset": txn.first_offset, "messages": None}
            for txn in each.open
        ]
        + [
            {"id": txn_id, "first_offset": None, "messages": count}
            for txn_id, count in each.waiting.items()
        ],
    }
