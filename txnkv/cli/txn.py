"""`txnkv txn`: transactions as they stand in the status table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import click

import txnkv
from txnkv.cli.console import (
    duration,
    json_option,
    print_grid,
    print_json,
    print_pairs,
    store_argument,
    tell,
)
from txnkv.client import TxnInfo
from txnkv.coordinator import TxnId, TxnState
from txnkv.errors import TxnNotFoundError
from txnkv.topics import SentTo, sent_to

Sent: TypeAlias = Mapping[int, Sequence[SentTo]]
"""The partitions that transactions have sent messages to, by their local ids."""


@click.group()
def txn() -> None:
    """List, show and abort transactions."""


@txn.command("list")
@store_argument
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.name for state in TxnState], case_sensitive=False),
    help="These states alone; may be repeated.",
)
@json_option
def list_(store: str, states: tuple[str, ...], as_json: bool) -> None:
    """List the transactions that are open and those that ended of late.

    Of those that are not decided, the partitions they have sent messages to: `events/0 @12` from
    offset 12 on, in the log; with * where readers of committed messages wait for it;
    `events/0 +500` waiting in a side log, where nobody waits for them. It is told on the store's
    host; by a server's address it is "?", and null in JSON.
    """
    with txnkv.connect(store, create=False, read_only=True) as client:
        found, sent = client.transactions(), _sent(client)
    if states:
        found = [info for info in found if info.state.name in states]
    if as_json:
        print_json([_document(info, sent) for info in found])
    elif not found:
        click.echo("no transactions")
    else:
        print_grid(
            ["id", "state", "begun", "open for", "messages", "note"],
            [_cells(info, sent) for info in found],
            right=["id", "open for"],
        )
        for info in found:
            _print_held(store, info, sent)


@txn.command()
@store_argument
@click.argument("id", type=int)
@json_option
def show(store: str, id: int, as_json: bool) -> None:
    """Show the transaction ID."""
    with txnkv.connect(store, create=False, read_only=True) as client:
        info, sent = _find(client, id), _sent(client)
    document = _document(info, sent)
    if as_json:
        print_json(document)
        return
    document["messages"] = _sent_cell(info, sent) or None
    if document["open_seconds"] is not None:
        document["open_seconds"] = duration(document["open_seconds"])
    print_pairs(
        ("open for" if name == "open_seconds" else name, _shown(value))
        for name, value in document.items()
    )
    _print_held(store, info, sent)


@txn.command()
@store_argument
@click.argument("id", type=int)
@json_option
def abort(store: str, id: int, as_json: bool) -> None:
    """Abort the transaction ID, whichever process began it. Twice is fine."""
    with txnkv.connect(store, create=False) as client:
        client.abort_transaction(id)
        state = client.transaction_state(id)
    tell(as_json, {"id": id, "state": state.name}, f"transaction {id} is {state.name}")


def _find(client: txnkv.Client, id: int) -> TxnInfo:
    wanted = TxnId(id)
    for info in client.transactions():
        if info.id == wanted or (wanted.tcid == 0 and info.id.local == wanted.local):
            return info
    raise TxnNotFoundError(
        f"there is no transaction {id}, or it ended so long ago that it was forgotten; "
        "`txnkv txn list` shows those that are known"
    )


def _sent(client: txnkv.Client) -> Sent | None:
    """Return what the folder tells; None: the client is of a server's address."""
    return None if client.elsewhere is not None else sent_to(client.instance.topics)


def _open_seconds(info: TxnInfo) -> float | None:
    """Since when it is undecided; None: it has ended."""
    if info.state in (TxnState.COMMITTED, TxnState.ABORTED):
        return None
    return max((datetime.now(UTC) - info.begin.datetime).total_seconds(), 0.0)


def _sent_cell(info: TxnInfo, sent: Sent | None) -> str:
    if sent is None:
        return "" if _open_seconds(info) is None else "?"
    return ", ".join(
        f"{to.topic}/{to.partition} +{to.messages:,}"
        if to.first_offset is None
        else f"{to.topic}/{to.partition} @{to.first_offset}{'*' if to.holds_back else ''}"
        for to in sent.get(info.id.local, ())
    )


def _print_held(store: str, info: TxnInfo, sent: Sent | None) -> None:
    """That readers wait for it, and how to end it."""
    held = [to for to in (sent or {}).get(info.id.local, ()) if to.holds_back]
    age = _open_seconds(info)
    if held and age is not None:
        where = ", ".join(f"{to.topic}/{to.partition} at {to.first_offset}" for to in held)
        click.echo(
            f"\ntransaction {info.id.local} holds back {where}, open for {duration(age)}; "
            f"if nobody will end it: txnkv txn abort {store} {info.id.local}"
        )


def _begun(info: TxnInfo) -> str:
    """In UTC; today's without the day."""
    when = info.begin.datetime
    today = when.date() == datetime.now(UTC).date()
    return f"{when:%H:%M:%S}" if today else f"{when:%Y-%m-%d %H:%M:%S}"


def _cells(info: TxnInfo, sent: Sent | None) -> list[str]:
    age = _open_seconds(info)
    limit = "" if info.timeout is None else f" of {info.timeout:g} s"
    return [
        str(info.id.local),
        info.state.name,
        _begun(info),
        "" if age is None else duration(age) + limit,
        _sent_cell(info, sent),
        info.reason or "",
    ]


def _document(info: TxnInfo, sent: Sent | None) -> dict[str, Any]:
    commit = info.commit
    return {
        "id": info.id.local,
        "full_id": str(int(info.id)),
        "state": info.state.name,
        "begun": info.begin.datetime.isoformat(),
        "open_seconds": _open_seconds(info),
        "commit_timestamp": None if commit is None else int(commit),
        "committed": None if commit is None else commit.datetime.isoformat(),
        "timeout": info.timeout,
        "isolation": info.isolation,
        "locking": info.locking,
        "participants": info.participants,
        "messages": None if sent is None else [to._asdict() for to in sent.get(info.id.local, ())],
        "reason": info.reason,
    }


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
