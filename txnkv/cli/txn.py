"""`txnkv txn`: transactions as they stand in the status table."""

from __future__ import annotations

from typing import Any

import click

import txnkv
from txnkv.cli.console import json_option, print_grid, print_json, print_pairs, store_argument
from txnkv.coordinator.ids import TxnId
from txnkv.coordinator.states import TxnState
from txnkv.errors import TxnNotFoundError
from txnkv.txn_info import TxnInfo


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
    """List the transactions that are open and those that ended of late."""
    with txnkv.connect(store, create=False, read_only=True) as client:
        found = client.transactions()
    if states:
        found = [info for info in found if info.state.name in states]
    if as_json:
        print_json([_document(info) for info in found])
    elif not found:
        click.echo("no transactions")
    else:
        print_grid(
            ["id", "state", "begun", "timeout", "participants", "note"],
            [_cells(info) for info in found],
            right=["id", "timeout", "participants"],
        )


@txn.command()
@store_argument
@click.argument("id", type=int)
@json_option
def show(store: str, id: int, as_json: bool) -> None:
    """Show the transaction ID."""
    with txnkv.connect(store, create=False, read_only=True) as client:
        info = _find(client, id)
    if as_json:
        print_json(_document(info))
    else:
        print_pairs((name, _shown(value)) for name, value in _document(info).items())


@txn.command()
@store_argument
@click.argument("id", type=int)
@json_option
def abort(store: str, id: int, as_json: bool) -> None:
    """Abort the transaction ID, whichever process began it. Twice is fine."""
    with txnkv.connect(store, create=False) as client:
        client.abort_transaction(id)
        state = client.transaction_state(id)
    if as_json:
        print_json({"id": id, "state": state.name})
    else:
        click.echo(f"transaction {id} is {state.name}")


def _find(client: txnkv.Client, id: int) -> TxnInfo:
    wanted = TxnId(id)
    for info in client.transactions():
        if info.id == wanted or (wanted.tcid == 0 and info.id.local == wanted.local):
            return info
    raise TxnNotFoundError(
        f"there is no transaction {id}, or it ended so long ago that it was forgotten; "
        "`txnkv txn list` shows those that are known"
    )


def _cells(info: TxnInfo) -> list[str]:
    return [
        str(info.id.local),
        info.state.name,
        info.begin.datetime.isoformat(sep=" ", timespec="milliseconds"),
        "none" if info.timeout is None else f"{info.timeout:g} s",
        str(info.participants),
        info.reason or "",
    ]


def _document(info: TxnInfo) -> dict[str, Any]:
    commit = info.commit
    return {
        "id": info.id.local,
        "full_id": str(int(info.id)),
        "state": info.state.name,
        "begun": info.begin.datetime.isoformat(),
        "commit_timestamp": None if commit is None else int(commit),
        "committed": None if commit is None else commit.datetime.isoformat(),
        "timeout": info.timeout,
        "isolation": info.isolation,
        "locking": info.locking,
        "participants": info.participants,
        "reason": info.reason,
    }


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
