"""`txnkv repair`: what a person has to say is so, before a store goes on."""

from __future__ import annotations

import click

import txnkv
from txnkv.cli.console import store_argument


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
    loss = client.accept_loss(part, dry_run=True)
    for line in loss.lines():
        click.echo(line)
    if not yes:
        raise click.ClickException(
            "this would be lost for good: say --yes, or restore a backup first"
        )
    client.accept_loss(part)
    click.echo(f"{loss.part} works again" if loss else f"{loss.part} had lost nothing")
