"""The command line: `txnkv`, or `python -m txnkv`.

People get tables, programs get JSON (`--json`). What goes wrong is one line on stderr and
exit status 1; a wrong call is exit status 2.
"""

from __future__ import annotations

import click

from txnkv import __version__
from txnkv.cli.consume import consume
from txnkv.cli.demo import demo
from txnkv.cli.group import Group
from txnkv.cli.load import load
from txnkv.cli.looking import check, compact, init, stats, tables
from txnkv.cli.produce import produce
from txnkv.cli.scan import scan
from txnkv.cli.topics import topics
from txnkv.cli.txn import txn


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="txnkv")
def main() -> None:
    """Tables and topics with transactions, in a directory.

    STORE is the directory of a store, as `shop` or `data/shop`.
    """


for command in (
    init,
    load,
    scan,
    tables,
    topics,
    produce,
    consume,
    txn,
    stats,
    check,
    compact,
    demo,
):
    main.add_command(command)

__all__ = ["main"]
