"""`txnkv top`: a store as it lives, in a terminal.

A *sample* is what can be read of the store in one moment: transactions, partitions, subscriptions,
tables, sizes; and the numbers of each process that writes to it, which tells them while somebody
watches (`coordinator.watch`). A *view* is the last sample beside the one before: rates a second,
and the lengths of the commits in between, of all processes together.

    process 71   commits 100 -> 160                  sample 1 s later: 90 commits a second
    process 82   commits   7 ->  37

A process that came in between is counted from its second sample on, one that went until its last.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

import txnkv
from txnkv.cli.console import (
    duration,
    json_option,
    oldest_snapshot,
    out,
    print_json,
    require_folder,
    size,
    store_argument,
)
from txnkv.coordinator import TxnState, watch
from txnkv.errors import TxnkvError
from txnkv.topics import look_at_partition, sent_to

if TYPE_CHECKING:  # loaded when something is shown to people
    from rich.console import Group
    from rich.table import Table as RichTable

_RATES: Final = (
    "commits", "aborts", "conflicts", "timeouts", "messages_sent", "messages_delivered",
    "messages_acked", "flushed_rows", "compacted_rows",
)  # fmt: skip
_SUMS: Final = ("memory_bytes", "failing_parts", "flushes", "compactions")
_MOST: Final = 12
"""Rows of a grid, at most."""


@click.command()
@store_argument
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Look twice, and show that.")
@json_option
def top(store: str, interval: float, once: bool, as_json: bool) -> None:
    """Show a store as it lives, until Ctrl-C: who holds up whom, rates, latencies, lag, sizes.

    Rates and latencies are those of all processes that have the store open to write; each tells
    them, while somebody watches, once a second. Without a terminal (TERM=dumb is none), or with
    --json, it looks twice and ends.
    """
    require_folder(store, "a store is watched", "top")
    with txnkv.connect(store, create=False, read_only=True) as client:
        looks = views(client, interval)
        next(looks)
        console = out()
        if as_json or once or not console.is_terminal or console.is_dumb_terminal:
            time.sleep(max(0.0, 1.5 - interval))  # until the others have told something
            next(looks)
            view = next(looks)
            if as_json:
                print_json(view)
            else:
                console.print(_shown(view, console.width))
            return
        from rich.live import Live

        with Live(console=console, screen=True) as live:
            for view in looks:
                live.update(_shown(view, console.width), refresh=True)


# -- what is read ----------------------------------------------------------------------


def views(client: txnkv.Client, interval: float) -> Iterator[dict[str, Any]]:
    """Yield a view at once, and one after each interval."""
    before = _numbers(client)
    while True:
        yield {**_sample(client), **_rates(*before, *(before := _numbers(client)))}
        time.sleep(interval)


def _numbers(client: txnkv.Client) -> tuple[float, dict[tuple[int, str], dict[str, Any]]]:
    return time.monotonic(), watch(client.instance.store.directory.runtime_path)


def _rates(
    began: float,
    before: Mapping[tuple[int, str], dict[str, Any]],
    ended: float,
    after: Mapping[tuple[int, str], dict[str, Any]],
) -> dict[str, Any]:
    """Numbers a second and lengths of commits of the processes that are in both samples."""
    both = before.keys() & after.keys()
    seconds = max(ended - began, 1e-9)
    rates = {
        name: sum(max(after[each][name] - before[each][name], 0) for each in both) / seconds
        for name in _RATES
    }
    lengths: Counter[float] = Counter()
    for each in both:
        lengths.update(dict(after[each]["commit_seconds"]["classes"]))
        lengths.subtract(dict(before[each]["commit_seconds"]["classes"]))
    return {
        "processes": sorted(pid for pid, _ in after),
        "per_second": rates,
        "commit_seconds": {"p50": _share(lengths, 0.5), "p99": _share(lengths, 0.99)},
        **{name: sum(each[name] for each in after.values()) for name in _SUMS},
        "flush_lag_seconds": max(
            (each["flush_lag_seconds"] for each in after.values()), default=0.0
        ),
    }


def _share(lengths: Mapping[float, int], share: float) -> float | None:
    """The upper end of the class of lengths that holds this share; None where there are none."""
    ends = sorted(end for end, count in lengths.items() if count > 0)
    sums: list[int] = []
    for end in ends:
        sums.append((sums[-1] if sums else 0) + lengths[end])
    return ends[bisect_left(sums, share * sums[-1])] if ends else None


def _sample(client: txnkv.Client) -> dict[str, Any]:
    """Everything that can be read of a store now."""
    engine = client.instance.topics
    stats = client.stats()
    sent = sent_to(engine)
    now = datetime.now(UTC)
    transactions = []
    for info in client.transactions():
        if info.state in (TxnState.COMMITTED, TxnState.ABORTED):
            continue
        places = sent.get(info.id.local, ())
        transactions.append(
            {
                "id": info.id.local,
                "state": info.state.name,
                "seconds": max((now - info.begin.datetime).total_seconds(), 0.0),
                "timeout": info.timeout,
                "locking": info.locking,
                "participants": info.participants,
                "holds_up": [
                    f"{to.topic}/{to.partition} @{to.first_offset}"
                    for to in places
                    if to.holds_back
                ],
            }
        )
    partitions = []
    for name in client.topics():
        with suppress(TxnkvError):  # dropped meanwhile
            for partition in engine.partitions(engine.get(name)):
                each = look_at_partition(engine, partition)
                holder = each.held_by
                if holder is not None:
                    partitions.append(
                        {
                            "partition": f"{name}/{each.number}",
                            "stable": each.last_stable_offset,
                            "end": each.end,
                            "held_up_by": holder.txn_id,
                        }
                    )
    subscriptions = [
        {"topic": topic, "name": name, **found}
        for topic, about in stats["topics"].items()
        for name, found in about["subscriptions"].items()
    ]
    return {
        **{name: stats[name] for name in ("path", "snapshot", "leader_pid", "files_bytes")},
        **{name: stats[name] for name in ("log_commits", "log_bytes", "staged_bytes", "tables")},
        **{name: stats[name] for name in ("history_floor", "oldest_snapshot")},
        "topics": stats["topics"],
        "transactions": sorted(transactions, key=lambda each: -each["seconds"]),
        "held_up": partitions,
        "subscriptions": sorted(subscriptions, key=lambda each: -each["lag"]),
        "applications": _applications(client, now),
    }


def _applications(client: txnkv.Client, now: datetime) -> list[dict[str, Any]]:
    """Streams and jobs that commit versions, and how long ago each last did; the latest first."""
    found = [
        {
            "name": name,
            "version": last.version,
            "seconds": max((now - last.commit_ts.datetime).total_seconds(), 0.0),
        }
        for name, last in client.applications().items()
    ]
    return sorted(found, key=lambda each: each["seconds"])


# -- how it is shown -------------------------------------------------------------------


def _shown(view: dict[str, Any], width: int) -> Group:
    """All of a view, one grid below the other."""
    from rich.console import Group
    from rich.text import Text

    now = datetime.now(UTC)
    leader, oldest = view["leader_pid"], oldest_snapshot(view)
    head = Text.assemble(
        (view["path"], "bold"), f"  {now:%H:%M:%S} UTC  {size(view['files_bytes'])} on disk  ",
        f"{len(view['processes'])} writing  ",
        "no leader" if leader is None else f"leader {leader}",
        "" if oldest is None else f"  oldest snapshot {oldest}",
    )  # fmt: skip
    grids: list[Any] = [head, _now(view, width)]
    for title, names, rows in (
        ("transactions", ("id", "state", "age", "of", "locking", "parts", "holds up"),
         _transactions(view)),
        ("held up", ("partition", "stable", "end", "waiting", "by transaction"), _held_up(view)),
        ("subscriptions", ("topic", "name", "type", "lag", "leased", "free", "pending"),
         _subscriptions(view)),
        ("streams", ("stream", "batch", "since"), _streams(view)),
        ("tables", ("table", "rows", "size", "row sets", "deleted"), _tables(view)),
        ("topics", ("topic", "offsets", "size", "segments", "open"), _topics(view)),
    ):  # fmt: skip
        if rows:
            grids.append(_grid(title, names, rows))
        if rows and title == "held up":
            first = view["held_up"][0]["held_up_by"]
            grids.append(f"if nobody will end it: txnkv txn abort {view['path']} {first}")
    return Group(*(part for grid in grids for part in (grid, "")))


def _now(view: dict[str, Any], width: int) -> RichTable:
    """The numbers of now, in as many pairs of columns as there is room for."""
    from rich.table import Table

    rates, lengths = view["per_second"], view["commit_seconds"]
    pairs = [
        ("commits", f"{rates['commits']:,.0f}/s"),
        ("commit p50", _length(lengths["p50"])),
        ("commit p99", _length(lengths["p99"])),
        ("conflicts", f"{rates['conflicts']:,.1f}/s"),
        ("aborts", f"{rates['aborts']:,.1f}/s"),
        ("messages sent", f"{rates['messages_sent']:,.0f}/s"),
        ("delivered", f"{rates['messages_delivered']:,.0f}/s"),
        ("acknowledged", f"{rates['messages_acked']:,.0f}/s"),
        ("in memory", size(view["memory_bytes"])),
        ("in the log alone", f"{view['log_commits']:,}, {size(view['log_bytes'])}"),
        ("flush lag", duration(view["flush_lag_seconds"])),
        ("flushed rows", f"{rates['flushed_rows']:,.0f}/s"),
        ("compacted rows", f"{rates['compacted_rows']:,.0f}/s"),
        ("staged", size(view["staged_bytes"])),
        ("failing parts", f"{view['failing_parts']:.0f}"),
    ]
    columns = max(1, min(5, width // 30))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(style="dim")
        grid.add_column(justify="right")
    for start in range(0, len(pairs), columns):
        grid.add_row(*(text for pair in pairs[start : start + columns] for text in pair))
    return grid


def _length(seconds: float | None) -> str:
    """The upper end of a class of lengths, as <= 2.5 ms."""
    if seconds is None:
        return "-"
    return f"<= {seconds * 1e3:g} ms" if seconds < 1 else f"<= {seconds:g} s"


def _grid(title: str, names: tuple[str, ...], rows: list[list[str]]) -> RichTable:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", show_edge=False
    )
    left = {"partition", "state", "locking", "holds up", "topic", "name", "type", "table", "stream"}
    for name in names:
        grid.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows[:_MOST]:
        grid.add_row(*(Text(cell) for cell in row))
    grid.caption_justify = "left"
    if len(rows) > _MOST:
        grid.caption = f"and {len(rows) - _MOST:,} more"
    return grid


def _transactions(view: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(each["id"]),
            each["state"].lower(),
            duration(each["seconds"]),
            "" if each["timeout"] is None else duration(each["timeout"]),
            each["locking"],
            str(each["participants"]),
            ", ".join(each["holds_up"]),
        ]
        for each in view["transactions"]
    ]


def _held_up(view: dict[str, Any]) -> list[list[str]]:
    return [
        [
            each["partition"],
            f"{each['stable']:,}",
            f"{each['end']:,}",
            f"{each['end'] - each['stable']:,}",
            str(each["held_up_by"]),
        ]
        for each in view["held_up"]
    ]


def _subscriptions(view: dict[str, Any]) -> list[list[str]]:
    numbers = ("lag", "leased", "free", "pending")
    return [
        [each["topic"], each["name"], each["type"], *(f"{each[name]:,}" for name in numbers)]
        for each in view["subscriptions"]
    ]


def _streams(view: dict[str, Any]) -> list[list[str]]:
    return [
        [each["name"], f"{each['version']:,}", duration(each["seconds"])]
        for each in view["applications"]
    ]


def _tables(view: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            "damaged" if found["rows"] is None else f"{found['rows']:,}",
            size(found["bytes"]),
            f"{found['row_sets']:,}",
            f"{found['deleted_versions']:,}",
        ]
        for name, found in sorted(view["tables"].items(), key=lambda each: -each[1]["bytes"])
    ]


def _topics(view: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            f"{found['offsets']:,}",
            size(found["bytes"]),
            f"{found['segments']:,}",
            f"{found['open_transactions']:,}",
        ]
        for name, found in sorted(view["topics"].items(), key=lambda each: -each[1]["bytes"])
    ]
