"""`txnkv group`: subscriptions, their places, who has their messages."""

from __future__ import annotations

from typing import Any, cast

import click

import txnkv
from txnkv.cli.console import (
    duration,
    json_option,
    plural,
    print_grid,
    print_json,
    print_pairs,
    store_argument,
)
from txnkv.errors import TopicNotFoundError
from txnkv.options import Start, SubscriptionType
from txnkv.topics import (
    OPTIONS,
    HeldMessages,
    Holders,
    SubscriptionInfo,
    holders,
    subscription_stats,
)

topic_argument = click.argument("topic", metavar="TOPIC")
name_argument = click.argument("name", metavar="NAME")


@click.group()
def group() -> None:
    """List, show, move and drop the subscriptions of a topic."""


@group.command("list")
@store_argument
@topic_argument
@json_option
def list_(store: str, topic: str, as_json: bool) -> None:
    """List the subscriptions of TOPIC, and what each has to do.

    Leased messages are delivered and not acknowledged, free ones were given back, and the
    acknowledgement of a pending one waits for the commit of its transaction.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        engine = client.instance.topics
        found = engine.subscriptions.of_topic(client.topic(topic).info)
        documents = [{"name": info.name, **subscription_stats(engine, info)} for info in found]
    if as_json:
        print_json(documents)
    elif not documents:
        click.echo("no subscriptions")
    else:
        numbers = ["lag", "leased", "free", "pending"]
        print_grid(
            ["name", "type", *numbers, "consumer"],
            [
                [
                    each["name"],
                    each["type"],
                    *(f"{each[name]:,}" for name in numbers),
                    _process(each["consumer_pid"]),
                ]
                for each in documents
            ],
            right=numbers,
        )


@group.command()
@store_argument
@topic_argument
@name_argument
@json_option
def show(store: str, topic: str, name: str, as_json: bool) -> None:
    """Show the subscription NAME of TOPIC, and who has which message.

    What the one consumer of an exclusive subscription has is known to its process alone, unless
    deliveries are counted (max_deliveries, ack_timeout); pending acknowledgements of its small
    transactions, too.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        engine = client.instance.topics
        info = _find(client, topic, name)
        found = holders.look(engine, info)
        lag = engine.subscriptions.lag(info)
        committed = engine.subscriptions.committed(info)
    if as_json:
        print_json(
            _head(info, found)
            | {
                "partitions": [
                    {"partition": number, "committed": committed[number], "lag": lag[number]}
                    for number in lag
                ],
                "held": [_held_document(each) for each in found.held],
            }
        )
        return
    print_pairs(
        (key, "-" if value is None else str(value)) for key, value in _head(info, found).items()
    )
    click.echo()
    print_grid(
        ["partition", "committed", "lag"],
        [[str(number), str(committed[number]), f"{lag[number]:,}"] for number in lag],
        right=["partition", "committed", "lag"],
    )
    if found.held:
        click.echo()
        print_grid(
            ["partition", "offsets", "state", "by", "deliveries", "for"],
            [_held_cells(each) for each in found.held],
            right=["partition", "offsets", "deliveries", "for"],
        )


@group.command()
@store_argument
@topic_argument
@name_argument
@click.option(
    "--to", "where", metavar="WHERE", required=True, help="earliest, latest or an offset."
)
@click.option(
    "-p",
    "--partition",
    "partitions",
    multiple=True,
    type=click.IntRange(min=0),
    help="This partition alone; may be repeated.",
)
@json_option
def seek(
    store: str, topic: str, name: str, where: str, partitions: tuple[int, ...], as_json: bool
) -> None:
    """Move the subscription NAME of TOPIC.

    What lies below is done, and all from there on is delivered. Consumers of a shared one go on
    there; that of another one is to be closed first. Transactions that acknowledged messages of
    the partition are to be ended first. With several partitions it moves one after the other.
    """
    if where not in ("earliest", "latest") and not where.isdecimal():
        raise click.UsageError(f"--to is earliest, latest or an offset, not {where!r}")
    to = cast("Start", where) if not where.isdecimal() else int(where)
    with txnkv.connect(store, create=False) as client:
        info = _find(client, topic, name)
        count = len(info.topic.partitions)
        numbers = sorted(set(partitions)) or range(count)
        if numbers[-1] >= count:
            raise click.UsageError(f"topic {topic!r} has {plural(count, 'partition')}, from 0 on")
        if isinstance(to, int) and not partitions and count > 1:
            raise click.UsageError("an offset is one of a partition: say which with -p")
        kind = cast("SubscriptionType", info.type)
        with client.topic(topic).subscribe(name, kind) as subscription:
            for number in numbers:
                subscription.seek(number, to)
            committed = subscription.committed()
    if as_json:
        print_json({"name": name, "committed": [committed[number] for number in range(count)]})
    else:
        places = ", ".join(f"{number} at {committed[number]}" for number in numbers)
        click.echo(f"moved {name}: partition {places}")


@group.command()
@store_argument
@topic_argument
@name_argument
@json_option
def drop(store: str, topic: str, name: str, as_json: bool) -> None:
    """Forget the subscription NAME of TOPIC.

    Open transactions that acknowledged its messages are aborted.
    """
    with txnkv.connect(store, create=False) as client:
        client.topic(topic).drop_subscription(name)
    if as_json:
        print_json({"dropped": name})
    else:
        click.echo(f"dropped {name}")


def _find(client: txnkv.Client, topic: str, name: str) -> SubscriptionInfo:
    found = client.instance.topics.subscriptions.of_topic(client.topic(topic).info)
    for info in found:
        if info.name == name:
            return info
    names = ", ".join(info.name for info in found)
    raise TopicNotFoundError(
        f"topic {topic!r} has no subscription {name!r}; it has: {names or 'none'}"
    )


def _head(info: SubscriptionInfo, found: Holders) -> dict[str, Any]:
    options = {name: getattr(info, name) for name in OPTIONS}
    return {
        "name": info.name,
        "type": info.type,
        "consumer_pid": found.consumer_pid,
        **options,
    }


def _process(pid: int | None) -> str:
    return "" if pid is None else f"process {pid}"


def _held_cells(each: HeldMessages) -> list[str]:
    by = _process(each.pid) if each.txn_id is None else f"transaction {each.txn_id.local}"
    return [
        str(each.partition),
        str(each.first) if each.last == each.first + 1 else f"{each.first} to {each.last - 1}",
        each.state,
        by,
        "" if each.deliveries is None else str(each.deliveries),
        "" if each.seconds_left is None else duration(each.seconds_left),
    ]


def _held_document(each: HeldMessages) -> dict[str, Any]:
    return {
        "partition": each.partition,
        "first": each.first,
        "last": each.last - 1,
        "state": each.state,
        "pid": each.pid,
        "transaction": None if each.txn_id is None else each.txn_id.local,
        "deliveries": each.deliveries,
        "seconds_left": each.seconds_left,
    }
