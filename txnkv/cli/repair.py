"""`txnkv repair`: what a person has to say is so, before a store goes on."""

from __future__ import annotations

import click

import txnkv
from txnkv.cli.console import store_argument


@click.command()
@store_argument
@click.option("--clock", is_flag=True, help="This machine's clock is right: take its time.")
def repair(store: str, clock: bool) -> None:
    """Mend what needs somebody's word.

    With --clock the store's clock is set to this machine's, where that is ahead of it: for a
    store that was not used for more than ten years. It never goes back.
    """
    if not clock:
        raise click.UsageError("name what is to be mended: --clock")
    with txnkv.connect(store, create=False) as client:
        last = client.repair_clock()
    click.echo(f"the store's clock stands at {last.datetime.isoformat()}")
