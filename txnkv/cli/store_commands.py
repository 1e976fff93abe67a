"""`txnkv init, tables, stats, check, compact, backup, restore, dump, repair`: a whole store."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import txnkv
from txnkv.cli.command_group import given, stopping
from txnkv.cli.console import (
    json_option,
    oldest_snapshot,
    plural,
    print_grid,
    print_json,
    print_pairs,
    size,
    steps,
    store_argument,
    tell,
)
from txnkv.cli.parsing import snapshot
from txnkv.remote import is_address
from txnkv.storage import LIST, calls_ended, check_backup, place_of

_GIVING_UP = 30.0
"""Seconds for which a copy that was stopped may remove what it has written."""


@click.command()
@store_argument
@json_option
def init(store: str, as_json: bool) -> None:
    """Make an empty store; one that is there already is left as it is."""
    there = True
    try:
        opened = txnkv.connect(store, read_only=True)
    except txnkv.StoreNotFoundError:  # or nobody has made it to its end
        there, opened = False, txnkv.connect(store)
    with opened as client:
        path, tables = client.path, len(client.tables())
    tell(
        as_json,
        {"path": path, "made": not there, "tables": tables},
        f"{store} is a store already, with {plural(tables, 'table')}"
        if there
        else f"made the store {store}",
    )


@click.command()
@store_argument
@json_option
def tables(store: str, as_json: bool) -> None:
    """List the tables: rows, size, key and columns."""
    with txnkv.connect(store, create=False, read_only=True) as client:
        sizes = client.stats()["tables"]
        found = [_table_document(client.table(name), numbers) for name, numbers in sizes.items()]
    if as_json:
        print_json(found)
    elif not found:
        click.echo("no tables")
    else:
        print_grid(
            ["table", "rows", "size", "tablets", "primary key", "columns"],
            [_table_cells(entry) for entry in found],
            right=["rows", "size", "tablets"],
        )


def _table_document(table: txnkv.Table, numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": table.name,
        "rows": numbers["rows"],
        "bytes": numbers["bytes"],
        "tablets": numbers["tablets"],
        "primary_key": list(table.schema.primary_key),
        "columns": table.schema.type_names(),
    }


def _table_cells(entry: dict[str, Any]) -> list[str]:
    return [
        entry["name"],
        _rows(entry["rows"]),
        size(entry["bytes"]),
        str(entry["tablets"]),
        ", ".join(entry["primary_key"]),
        ", ".join(f"{name} {kind}" for name, kind in entry["columns"].items()),
    ]


def _rows(count: int | None) -> str:
    return "damaged" if count is None else f"{count:,}"


@click.command()
@store_argument
@json_option
def stats(store: str, as_json: bool) -> None:
    """Show numbers about a store: space, transactions, the latest snapshot."""
    with txnkv.connect(store, create=False, read_only=True) as client:
        found = client.stats()
    if as_json:
        print_json(found)
        return
    when = txnkv.Timestamp(found["snapshot"]).datetime
    transactions = ", ".join(f"{n:,} {name}" for name, n in sorted(found["transactions"].items()))
    leader = found["leader_pid"]
    print_pairs(
        [
            ("store", found["path"]),
            ("store id", found["store_id"]),
            ("space on disk", size(found["files_bytes"])),
            ("latest snapshot", f"{found['snapshot']} ({when:%Y-%m-%d %H:%M:%S} UTC)"),
            ("transactions", transactions or "none"),
            ("staged, undecided", _staged(found)),
            ("in the log alone", _logged(found)),
            ("history", _since(found["history_floor"])),
            ("oldest snapshot", oldest_snapshot(found) or "none but the latest"),
            ("leader", f"process {leader}" if leader is not None else "none at the moment"),
        ]
    )
    if found["tables"]:
        click.echo()
        print_grid(
            ["table", "rows", "size", "tablets", "row sets"],
            [
                [
                    name,
                    _rows(numbers["rows"]),
                    size(numbers["bytes"]),
                    str(numbers["tablets"]),
                    f"{numbers['row_sets']:,}",
                ]
                for name, numbers in found["tables"].items()
            ],
            right=["rows", "size", "tablets", "row sets"],
        )


def _logged(found: dict[str, Any]) -> str:
    if not found["log_commits"]:
        return "nothing"
    return f"{plural(found['log_commits'], 'commit')}, {size(found['log_bytes'])}"


def _since(floor: int) -> str:
    if not floor:
        return "all"
    return f"back to {txnkv.Timestamp(floor).datetime:%Y-%m-%d %H:%M:%S} UTC"


def _staged(found: dict[str, Any]) -> str:
    kinds = {
        "row set": ("staged_row_sets", "staged_bytes"),
        "message file": ("staged_files", "staged_file_bytes"),
    }
    texts = [
        f"{plural(found[count], kind)}, {size(found[taken])}"
        for kind, (count, taken) in kinds.items()
        if found[count]
    ]
    return "; ".join(texts) or "nothing"


@click.command()
@store_argument
@json_option
def check(store: str, as_json: bool) -> None:
    """Read everything in a store and compare it with its checksums and its catalog.

    Of a backup or a dump, a folder or an address, all files are compared with its list. Exit
    status 1 when something is wrong.
    """
    if os.path.exists(os.path.join(store, LIST)) or ("://" in store and not is_address(store)):
        _check_backup(store, as_json)
        return
    with (
        txnkv.connect(store, create=False, read_only=True) as client,
        steps("checking", "row sets") as step,
    ):
        report = client.check(step)
    counted = (
        f"{plural(report.rows, 'row')}, {plural(report.blocks, 'block')}, "
        f"{plural(report.row_sets, 'row set')}, {plural(report.commits, 'commit')} in the log"
    )
    if as_json:
        print_json({"ok": report.ok, **dataclasses.asdict(report)})
    elif report.ok:
        click.echo(f"ok: {counted}")
    else:
        for problem in report.problems:
            click.echo(problem)
    if not report.ok:
        raise click.ClickException(f"{plural(len(report.problems), 'problem')} found in {store}")


def _check_backup(place: str, as_json: bool) -> None:
    with steps("checking", "bytes") as step, given():
        found = check_backup(place_of(place, None), step)
    when = txnkv.Timestamp(found.content["timestamp"])
    tell(
        as_json,
        {"ok": True, "timestamp": when, "files": len(found.files), "size": found.size},
        f"ok: {plural(len(found.files), 'file')}, {size(found.size)}, as of "
        f"{when.datetime:%Y-%m-%d %H:%M:%S} UTC",
    )


@contextmanager
def _warned_behind() -> Iterator[None]:
    """Warnings come when all went well: an error, one line, says what they said."""
    from logging.handlers import MemoryHandler  # takes a while

    logger = logging.getLogger("txnkv")
    kept = MemoryHandler(1 << 16, logging.CRITICAL, logging.lastResort, flushOnClose=False)
    logger.addHandler(kept)
    try:
        yield
        kept.flush()
    finally:
        logger.removeHandler(kept)


@click.command()
@store_argument
@json_option
def compact(store: str, as_json: bool) -> None:
    """Merge row sets, leave out what nobody can see any more, give space back.

    Others may read and write meanwhile. Files get shorter where no other process has them open.
    """
    with (
        txnkv.connect(store, create=False) as client,
        steps("compacting", "rows") as step,
        stopping(lambda: "what was merged until then stays"),
        _warned_behind(),
    ):
        report = client.compact(step)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    gone = report.rows_before - report.rows_after
    click.echo(
        f"merged {plural(report.row_sets_before, 'row set')} into {report.row_sets_after:,}, "
        f"left out {plural(gone, 'row version')}; "
        f"files {size(report.files_before)} -> {size(report.files_after)}"
    )
    if report.messages_left_out:
        click.echo(f"left out {plural(report.messages_left_out, 'message')} that others hide")
    if report.in_use:
        click.echo(
            f"{plural(report.in_use, 'tablet')} in use by another process: their files stay as "
            "long as they are, what is free in them is used again"
        )


@click.command()
@store_argument
@click.option("--clock", is_flag=True, help="This machine's clock is right: take its time.")
@click.option("--accept-loss", "part", metavar="PART", help="Give up what this part has lost.")
@click.option("--yes", is_flag=True, help="Really give it up.")
def repair(store: str, clock: bool, part: str | None, yes: bool) -> None:
    """Mend what needs somebody's word.

    With --clock the store's clock is set to this machine's, where that is ahead of it: for a
    store that was not used for more than ten years. It never goes back.

    With --accept-loss a damaged tablet or partition, as orders/0 or topic:orders/0, works again
    without what it has lost. Without --yes it is only said what that is. Restore a backup of its
    files instead, if there is one.
    """
    if not clock and part is None:
        raise click.UsageError("name what is to be mended: --clock or --accept-loss PART")
    with txnkv.connect(store, create=False) as client:
        if clock:
            last = client.repair_clock()
            click.echo(f"the store's clock stands at {last.datetime.isoformat()}")
        if part is not None:
            _accept_loss(client, part, yes)


def _accept_loss(client: txnkv.Client, part: str, yes: bool) -> None:
    loss = client.accept_loss(part, dry_run=not yes)
    for line in loss.lines():
        click.echo(line)
    if loss and not yes:
        raise click.ClickException(
            "this would be lost for good: say --yes, or restore a backup first"
        )
    if not yes:
        click.echo(f"{loss.part} has lost nothing; if it does not work, say --yes")
        return
    click.echo(f"{loss.part} works again" if loss else f"{loss.part} had lost nothing")


def _left(dest: str) -> str:
    """The end of a line after Ctrl-C: the work ends between two of its steps."""
    if not calls_ended(_GIVING_UP):
        return f"the unfinished copy is left beside {dest}, and goes when that is made again"
    done = os.path.isdir(dest) and os.listdir(dest)
    return f"{dest} had just been finished" if done else f"nothing is left at {dest}"


@click.command()
@store_argument
@click.argument("dest", metavar="DEST")
@click.option(
    "--base", metavar="EARLIER", help="An earlier backup: what is in it is linked, not copied."
)
@click.option(
    "--limit",
    metavar="MIB",
    type=click.FloatRange(min=0, min_open=True),
    help="Write at most so many MiB a second.",
)
@json_option
def backup(store: str, dest: str, base: str | None, limit: float | None, as_json: bool) -> None:
    """Copy a store while it is in use: all that is committed at one instant.

    DEST is a folder that is not there yet, or an address as s3://bucket/folder. Others may read and
    write meanwhile. With --base each backup takes what it has in common with an earlier one from
    there, and is whole by itself: any of them may be removed.
    """
    with (
        txnkv.connect(store, create=False) as client,
        steps("copying", "bytes") as step,
        stopping(lambda: _left(dest)),
    ):
        rate = None if limit is None else limit * (1 << 20)
        done = client.backup(dest, base=base, bytes_per_second=rate, progress=step)
    linked = f", {size(done.linked)} of it linked" if base is not None else ""
    tell(
        as_json,
        dataclasses.asdict(done),
        f"copied {store} as of {done.timestamp.datetime:%Y-%m-%d %H:%M:%S} UTC to {done.path}: "
        f"{plural(done.files, 'file')}, {size(done.size)}{linked}",
    )


@click.command()
@click.argument("src", metavar="SRC")
@click.argument("dest", metavar="DEST")
@click.option("--at", metavar="TIME", help="Of several backups in SRC, the last one until then.")
@json_option
def restore(src: str, dest: str, at: str | None, as_json: bool) -> None:
    """Make a store of a backup or a dump.

    SRC is a backup or a dump, or a folder with several of one store, of which the latest is taken;
    a path or an address. DEST is a folder that is not there yet. The new store is another one than
    that which was copied: tokens and checkpoints of streams do not take it for that.
    """
    with given():
        until = None if at is None else snapshot(at, "--at")
    with (
        steps("restoring", "bytes") as step,
        stopping(lambda: _left(dest)),
    ):
        done = txnkv.restore(src, dest, at=until, progress=step)
    when = done.timestamp.datetime
    tell(
        as_json,
        dataclasses.asdict(done),
        f"made the store {done.path} as of {when:%Y-%m-%d %H:%M:%S} UTC, of {done.backup}, "
        f"{size(done.size)}",
    )


@click.command()
@store_argument
@click.argument("dest", metavar="DEST")
@json_option
def dump(store: str, dest: str, as_json: bool) -> None:
    """Write a store to plain files: rows and messages in Parquet, all else in JSON.

    All that is committed at one instant, while others go on. DEST is a folder that is not there
    yet; for a while a copy of the store is in it, too. For other programs, and for a txnkv that
    does not read this one's stores: `txnkv restore` makes a store of a dump.
    """
    with (
        txnkv.connect(store, create=False) as client,
        steps("dumping") as step,
        stopping(lambda: _left(dest)),
    ):
        done = txnkv.dump(client, dest, progress=step)
    tell(
        as_json,
        dataclasses.asdict(done),
        f"dumped {store} as of {done.timestamp.datetime:%Y-%m-%d %H:%M:%S} UTC to {done.path}: "
        f"{plural(done.rows, 'row')} of {plural(done.tables, 'table')}, "
        f"{plural(done.messages, 'message')} of {plural(done.topics, 'topic')}, {size(done.size)}",
    )
