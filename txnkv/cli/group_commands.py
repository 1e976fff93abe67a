"""`txnkv group`: the subscriptions of a topic, and the consumer groups that read it.

They tell who holds what back: consumers and pending acknowledgements the messages of a
subscription.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import click

import txnkv
from txnkv.cli.console import (
    duration,
    json_option,
    partitions_option,
    plural,
    print_grid,
    print_json,
    print_pairs,
    store_argument,
    tell,
    topic_argument,
    topic_or_none_argument,
)
from txnkv.client import OFFSETS_TABLE, Planning, live_members
from txnkv.errors import OffsetOutOfRangeError, TopicNotFoundError, UnavailableError
from txnkv.topics import (
    OPTIONS,
    HeldMessages,
    Holders,
    Start,
    SubscriptionInfo,
    SubscriptionType,
)

_GROUP: Final = "group"
_UNDONE: Final = (
    "members that are Kafka's clients are not known here: stop them first, or their next commit "
    "undoes it"
)

name_argument = click.argument("name", metavar="NAME")


@click.group()
def group() -> None:
    """List, show, move and drop the subscriptions and consumer groups of topics."""


@group.command("list")
@store_argument
@topic_or_none_argument
@json_option
def list_(store: str, topic: str | None, as_json: bool) -> None:
    """List the subscriptions and groups of TOPIC, or of all topics.

    Leased messages are delivered and not acknowledged, free ones were given back, the time of
    delayed ones has not come, and the acknowledgement of a pending one waits for the commit of its
    transaction. Consumer groups, Kafka's too, come last, with the lag of partitions that they
    committed; members that are Kafka's clients are known to their server alone, and not counted.
    """
    documents = []
    with txnkv.connect(store, create=False, read_only=True) as client:
        for name in client.topics() if topic is None else [topic]:
            found = Planning.of(client).subscriptions(name)
            groups = [{"name": each, **found[each], "members": None} for each in found]
            groups += _consumer_groups(client, client.topic(name))
            documents += [{"topic": name, **each} for each in groups]
    if as_json:
        print_json(documents)
    elif not documents:
        click.echo("no subscriptions")
    else:
        texts = ["topic"] * (topic is None) + ["name", "type"]
        numbers = ["lag", "leased", "free", "delayed", "pending"]
        rows = []
        for each in documents:
            counts = [f"{each[name]:,}" for name in numbers]
            who = _process_text(each["consumer_pid"])
            if each["members"] is not None:
                who = plural(each["members"], "member")
                who += ", Kafka's not counted" * (not each["members"])
            rows.append([*(each[name].replace("\n", "\\n") for name in texts), *counts, who])
        print_grid([*texts, *numbers, "consumer"], rows, right=numbers)


@group.command()
@store_argument
@topic_argument
@name_argument
@json_option
def show(store: str, topic: str, name: str, as_json: bool) -> None:
    """Show the subscription NAME of TOPIC, and who has which message; or the group.

    What the one consumer of an exclusive subscription has is known to its process alone, unless
    deliveries are counted (max_deliveries, ack_timeout); pending acknowledgements of its small
    transactions, too. Members of a group that are Kafka's clients are known to their server alone,
    and not shown.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        if _is_group(client, topic, name):
            _show_group(_group_document(client, client.topic(topic), name), as_json)
            return
        info, found, lag, committed = Planning.of(client).subscription(topic, name)
    if as_json:
        print_json(
            _subscription_document(info, found)
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
        (key, "-" if value is None else str(value))
        for key, value in _subscription_document(info, found).items()
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
@partitions_option
@json_option
def seek(
    store: str, topic: str, name: str, where: str, partitions: tuple[int, ...], as_json: bool
) -> None:
    """Move the subscription or group NAME of TOPIC.

    What lies below is done, and all from there on is delivered. Consumers of a shared one go on
    there; that of another one is to be closed first. Transactions that acknowledged messages of
    the partition are to be ended first. With several partitions it moves one after the other.
    Members of a group go on there; those that are Kafka's clients must be stopped first, or their
    next commit undoes it.
    """
    if where not in ("earliest", "latest") and not where.isdecimal():
        raise click.UsageError(f"--to is earliest, latest or an offset, not {where!r}")
    to = cast("Start", where) if not where.isdecimal() else int(where)
    with txnkv.connect(store, create=False) as client:
        is_group = _is_group(client, topic, name)
        count = client.topic(topic).partitions
        numbers = sorted(set(partitions)) or range(count)
        if numbers[-1] >= count:
            raise click.UsageError(f"topic {topic!r} has {plural(count, 'partition')}, from 0 on")
        if isinstance(to, int) and not partitions and count > 1:
            raise click.UsageError("an offset is one of a partition: say which with -p")
        if is_group:
            committed = _move_group(client, client.topic(topic), name, numbers, to)
            if not live_members(client, name, topic):  # who has some takes none of Kafka's
                click.echo(_UNDONE, err=True)
        else:
            kind = cast("SubscriptionType", Planning.of(client).subscription(topic, name)[0].type)
            with client.topic(topic).subscribe(name, kind) as subscription:
                for number in numbers:
                    subscription.seek(number, to)
                committed = subscription.committed()
    places = ", ".join(f"{number} at {committed[number]}" for number in numbers)
    tell(
        as_json,
        {"name": name, "committed": [committed.get(number) for number in range(count)]},
        f"moved {name}: partition {places}",
    )


@group.command()
@store_argument
@topic_argument
@name_argument
@json_option
def drop(store: str, topic: str, name: str, as_json: bool) -> None:
    """Forget the subscription NAME of TOPIC, or the positions of a group in it.

    Open transactions that acknowledged its messages are aborted. Members of a group must leave
    first; those that are Kafka's clients are not seen, and their next commit undoes it.
    """
    with txnkv.connect(store, create=False) as client:
        if _is_group(client, topic, name):
            _drop_group(client, client.topic(topic), name)
            click.echo(_UNDONE, err=True)
        else:
            client.topic(topic).drop_subscription(name)
    tell(as_json, {"dropped": name}, f"dropped {name}")


def _show_group(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    names = ["partition", "committed", "lag", "member"]
    if not document["members"]:
        click.echo("members: none; those that are Kafka's clients are not known here")
    for part, columns in (("members", ["member", "process", "since"]), ("partitions", names)):
        rows = [["" if row[n] is None else str(row[n]) for n in columns] for row in document[part]]
        if rows:
            print_grid(columns, rows, right=["partition", "committed", "lag", "member"])


def _is_group(client: txnkv.Client, topic: str, name: str) -> bool:
    """Tell whether this is a group, and not a subscription.

    Raises:
        TopicNotFoundError: it is neither.
    """
    handle = client.topic(topic)
    found = handle.subscriptions()
    groups = [each["name"] for each in _consumer_groups(client, handle)]
    if name in found or name in groups:
        return name not in found
    raise TopicNotFoundError(
        f"topic {topic!r} has no subscription or group {name!r}; it has: "
        f"{', '.join([*found, *groups]) or 'none'}"
    )


def _subscription_document(info: SubscriptionInfo, found: Holders) -> dict[str, Any]:
    options = {name: getattr(info, name) for name in OPTIONS}
    return {
        "name": info.name,
        "type": info.type,
        "consumer_pid": found.consumer_pid,
        **options,
    }


def _process_text(pid: int | None) -> str:
    return "" if pid is None else f"process {pid}"


def _held_cells(each: HeldMessages) -> list[str]:
    by = _process_text(each.pid) if each.txn_id is None else f"transaction {each.txn_id.local}"
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


# -- consumer groups, those of Kafka's clients too -----------------------------------------


def _consumer_groups(client: txnkv.Client, topic: txnkv.Topic) -> list[dict[str, Any]]:
    """The groups that have committed anything of a topic, as documents of subscriptions."""
    rows = _rows(client, topic)
    ends = topic.last_stable_offsets()
    names = ("lost", "leased", "free", "delayed", "pending", "kept")
    rest: dict[str, Any] = dict.fromkeys(names, 0) | {"consumer_pid": None}
    found = []
    for name in sorted({row["group"] for row in rows}):
        lags = [_lag(row, ends) for row in rows if row["group"] == name]
        members = len(live_members(client, name, topic.name))
        found.append({"name": name, "type": _GROUP, "lag": sum(lags), **rest, "members": members})
    return found


def _group_document(client: txnkv.Client, topic: txnkv.Topic, name: str) -> dict[str, Any]:
    """A group, with its members and its positions in a topic."""
    ends = topic.last_stable_offsets()
    members = live_members(client, name, topic.name)
    live = {row["member"] for row in members}
    return {
        "name": name,
        "type": _GROUP,
        "members": [
            {
                "member": row["member"],
                "process": row["process"],
                "since": row["joined"].isoformat(timespec="seconds"),
            }
            for row in members
        ],
        "partitions": [
            {
                "partition": row["partition"],
                "committed": row["offset"],
                "lag": _lag(row, ends),
                "member": row["member"] if row["member"] in live else None,
            }
            for row in _rows(client, topic)
            if row["group"] == name
        ],
    }


def _move_group(
    client: txnkv.Client, topic: txnkv.Topic, name: str, numbers: Iterable[int], to: Start | int
) -> dict[int, int]:
    """Move a group's positions in some partitions; return all that it has.

    Raises:
        OffsetOutOfRangeError: a partition ends before that.
    """
    if isinstance(to, int):
        offsets = dict.fromkeys(numbers, to)
        for number, end in topic.end_offsets().items():
            if offsets.get(number, 0) > end:
                raise OffsetOutOfRangeError(f"partition {number} ends at {end}, before {to}")
    else:
        with topic.consumer(start=to, partitions=list(numbers)) as reader:
            offsets = {number: reader.position(number) for number in numbers}

    def move(txn: txnkv.Transaction) -> None:
        for number, offset in offsets.items():
            row = txn.get(OFFSETS_TABLE, (name, topic.name, number))
            if row is not None:
                txn.upsert(OFFSETS_TABLE, row | {"offset": offset})

    client.run(move)
    found = [row for row in _rows(client, topic) if row["group"] == name]
    return {row["partition"]: row["offset"] for row in found}


def _drop_group(client: txnkv.Client, topic: txnkv.Topic, name: str) -> None:
    """Forget a group's positions in a topic.

    Raises:
        UnavailableError: it has members.
    """
    members = live_members(client, name, topic.name)
    if members:
        processes = ", ".join(sorted({row["process"] for row in members}))
        raise UnavailableError(
            f"group {name!r} has members in {processes}: let them leave, then try again"
        )

    def forget(txn: txnkv.Transaction) -> None:
        where = [("group", "=", name), ("topic", "=", topic.name)]
        for row in txn.scan(OFFSETS_TABLE, where=where):
            txn.delete(OFFSETS_TABLE, (name, topic.name, row["partition"]))

    client.run(forget)


def _rows(client: txnkv.Client, topic: txnkv.Topic) -> list[dict[str, Any]]:
    if OFFSETS_TABLE not in client.tables():
        return []
    table = client.table(OFFSETS_TABLE)
    found = list(table.scan(where=[("topic", "=", topic.name)], ordered=True))
    return [{"member": None, **row} for row in found]


def _lag(row: dict[str, Any], ends: dict[int, int]) -> int:
    offset: int = max(row["offset"], 0)
    return max(ends.get(row["partition"], 0) - offset, 0)
