"""`txnkv topics`: topics with their partitions, and what holds readers back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
import pyarrow as pa

import txnkv
from txnkv.cli import parsing
from txnkv.cli.command_group import given, words
from txnkv.cli.console import (
    confirm,
    duration,
    json_option,
    partitions_option,
    plural,
    print_grid,
    print_json,
    print_pairs,
    size,
    store_argument,
    tell,
    topic_argument,
    topic_or_none_argument,
    yes_option,
)
from txnkv.client import Planning
from txnkv.core import type_name
from txnkv.topics import (
    PartitionOverview,
    TopicOverview,
)

_UNIX: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TopicsGroup(click.Group):
    """A group whose `list` goes without its name: `topics STORE` is `topics list STORE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = [*self.commands, *ctx.help_option_names]
        if (args[0] not in named) if args else not ctx.resilient_parsing:  # as for completion
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=TopicsGroup)
def topics() -> None:
    """List topics, make, alter, truncate and drop them.

    `txnkv topics STORE [TOPIC]` is `txnkv topics list STORE [TOPIC]`.
    """


@topics.command()
@store_argument
@topic_argument
@click.option(
    "--partitions", type=click.IntRange(min=1), default=1, show_default=True, help="How many."
)
@parsing.topic_options("")
@click.option("--exists-ok", is_flag=True, help="One that is there already, alike, is fine.")
@json_option
def create(
    store: str, topic: str, partitions: int, exists_ok: bool, as_json: bool, **options: Any
) -> None:
    """Make TOPIC, and the store when it is missing."""
    with txnkv.connect(store) as client:
        there = topic in client.topics()
        with given():
            client.create_topic(
                topic, partitions, exists_ok=exists_ok, **parsing.topic_arguments(**options)
            )
    tell(
        as_json,
        {"name": topic, "made": not there, "partitions": partitions},
        f"{topic} is there already"
        if there
        else f"made {topic} of {plural(partitions, 'partition')}",
    )


@topics.command()
@store_argument
@topic_argument
@click.option("--partitions", type=click.IntRange(min=1), help="Have so many: more than before.")
@parsing.change_options
@json_option
def alter(store: str, topic: str, partitions: int | None, as_json: bool, **options: Any) -> None:
    """Change options of TOPIC; those that are not given stay as they are.

    Messages that are there stay as they are. Retention goes by it within a minute.
    Partitions may be added: from then on a key may go to another one than before.
    """
    changes = parsing.topic_changes(**options)
    if not changes and partitions is None:
        raise click.UsageError("nothing to change: give one of the options")
    with txnkv.connect(store, create=False) as client:
        altered = client.topic(topic)
        try:
            now = {**altered.alter(partitions, **changes), "partitions": altered.partitions}
        except ValueError as error:  # not SchemaError: that it does not fit those that are there
            raise click.UsageError(words(error)) from error
        codec = altered.info.options.codec
    if as_json:
        columns = None if codec is None else _column_types(codec.schema)
        print_json({"name": topic, **now, "value_schema": columns})
    else:
        if codec is not None:
            now["values"] = codec.described
        print_pairs((name, "none" if value is None else str(value)) for name, value in now.items())


@topics.command()
@store_argument
@topic_argument
@click.option("--before", metavar="WHERE", help="The first that stays: latest, or an offset.")
@click.option("--after", type=click.IntRange(min=-1), help="The last that stays: an offset.")
@partitions_option
@yes_option
@json_option
def truncate(
    store: str, topic: str, before: str | None, after: int | None, partitions: tuple[int, ...],
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Give up messages of TOPIC, below an offset or behind one, for good.

    latest is all that is decided, but for what the topic keeps for subscriptions. Offsets that
    were cut off behind one are not given again. Asks first, or wants --yes where nobody can answer.
    """
    if (before is None) == (after is None):
        raise click.UsageError("give one of --before and --after")
    where = str(after) if before is None else before
    if after is None and where != "latest" and not where.isdecimal():
        raise click.UsageError(f"--before is latest or an offset, not {where!r}")
    with txnkv.connect(store, create=False) as client:
        found = client.topic(topic)
        numbers = sorted(set(partitions)) or list(range(found.partitions))
        if where != "latest" and len(numbers) > 1:
            raise click.UsageError("an offset is one of a partition: say which with -p")
        ends = found.last_stable_offsets()
        if not set(numbers) <= ends.keys():
            raise click.UsageError(
                f"topic {topic!r} has {plural(found.partitions, 'partition')}, from 0 on"
            )
        wanted = {number: int(where) if where != "latest" else ends[number] for number in numbers}
        there = ", ".join(f"{offset} in partition {number}" for number, offset in wanted.items())
        side = "below" if after is None else "behind"
        confirm(f"give up messages of {topic} {side} {there}?", yes)
        if after is not None:
            places = found.truncate(after=wanted)
        else:
            places = found.truncate("latest" if where == "latest" and not partitions else wanted)
    edge = ("starts", "begins") if after is None else ("ends", "ends")
    tell(
        as_json,
        {"name": topic, edge[0]: {str(n): places[n] for n in places}},
        f"{topic} {edge[1]}: " + ", ".join(f"partition {n} at {places[n]}" for n in places),
    )


@topics.command("drop")
@store_argument
@topic_argument
@click.option("--missing-ok", is_flag=True, help="None of this name is fine.")
@yes_option
@json_option
def drop_topic(store: str, topic: str, missing_ok: bool, yes: bool, as_json: bool) -> None:
    """Drop TOPIC with its messages and subscriptions, at once and for good.

    Asks first, or wants --yes where nobody can answer. Open transactions that touched it are
    aborted.
    """
    with txnkv.connect(store, create=False) as client:
        there = topic in client.topics()
        if there:
            offsets = sum(client.topic(topic).end_offsets().values())
            confirm(f"drop {topic}, which goes to {plural(offsets, 'offset')}?", yes)
        client.drop_topic(topic, missing_ok=missing_ok)
    tell(
        as_json,
        {"dropped": topic if there else None},
        f"dropped {topic}" if there else f"there is no {topic}",
    )


@topics.command("list")
@store_argument
@topic_or_none_argument
@json_option
def list_topics(store: str, topic: str | None, as_json: bool) -> None:
    """List the topics; or the partitions and subscriptions of TOPIC.

    Offsets are counted from the start of each partition to its end, with those that end
    transactions. What lies at or above the stable offset of a partition waits for an open
    transaction; the output says for which, and how to end it.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        names = client.topics() if topic is None else [topic]
        found = [Planning.of(client).overview(name) for name in names]
    if as_json:
        documents = [_topic_document(each) for each in found]
        print_json(documents if topic is None else documents[0])
    elif topic is not None:
        _print_topic(store, found[0])
    elif not found:
        click.echo("no topics")
    else:
        print_grid(
            ["topic", "buffer", "partitions", "offsets", "size", "open", "lag"],
            [_topic_cells(each) for each in found],
            right=["partitions", "offsets", "size", "open"],
        )
        _print_held_back(store, found)
        _print_damage(store, found)


def _topic_cells(found: TopicOverview) -> list[str]:
    return [
        found.topic.name,
        found.topic.buffer,
        str(len(found.partitions)),
        f"{sum(each.end - each.start for each in found.partitions):,}",
        size(sum(each.bytes for each in found.partitions)),
        str(len(_open_transactions(found))),
        ", ".join(f"{each.name} {sum(each.lag.values()):,}" for each in found.subscriptions),
    ]


def _open_transactions(found: TopicOverview) -> set[int]:
    logs = {txn.txn_id for each in found.partitions for txn in each.open}
    return logs | {txn_id for each in found.partitions for txn_id in each.waiting}


def _print_topic(store: str, found: TopicOverview) -> None:
    options = found.topic.options
    kept = [
        f"{duration(options.retention_seconds)}" if options.retention_seconds else "",
        size(options.retention_bytes) if options.retention_bytes else "",
    ]
    unacknowledged = ", and what is not acknowledged" if options.retain_unacknowledged else ""
    compacted = ", the last message of each key" if options.cleanup == "compact" else ""
    click.echo(
        f"{found.topic.name}: {found.topic.buffer} buffer, "
        f"compression {options.compression or 'none'}, "
        f"keeps {' and '.join(filter(None, kept)) or 'everything'}{compacted}{unacknowledged}"
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
    _print_held_back(store, [found])
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


def _print_held_back(store: str, found: list[TopicOverview]) -> None:
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


def _topic_document(found: TopicOverview) -> dict[str, Any]:
    options = found.topic.options
    return {
        "name": found.topic.name,
        "buffer": found.topic.buffer,
        "compression": options.compression,
        "retention_seconds": options.retention_seconds,
        "retention_bytes": options.retention_bytes,
        "retain_unacknowledged": options.retain_unacknowledged,
        "cleanup": options.cleanup,
        "tombstone_seconds": options.tombstone_seconds,
        "value_schema": _column_types(options.value_schema),
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


def _column_types(schema: pa.Schema | None) -> dict[str, str] | None:
    if schema is None:
        return None
    return {each.name: f"{type_name(each.type)}{'?' if each.nullable else ''}" for each in schema}


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
