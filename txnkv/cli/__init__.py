"""The command line: `txnkv`, or `python -m txnkv`.

People get tables, programs get JSON (`--json`). What goes wrong is one line on stderr; `group` has
the exit statuses.
"""

from __future__ import annotations

import click

from txnkv.cli.group import Group
from txnkv.version import __version__

_HOMES = {
    "init": "txnkv.cli.looking",
    "load": "txnkv.cli.load",
    "scan": "txnkv.cli.scan",
    "tables": "txnkv.cli.looking",
    "topics": "txnkv.cli.topics",
    "produce": "txnkv.cli.produce",
    "consume": "txnkv.cli.consume",
    "group": "txnkv.cli.subscriptions",
    "txn": "txnkv.cli.txn",
    "stats": "txnkv.cli.looking",
    "check": "txnkv.cli.looking",
    "compact": "txnkv.cli.looking",
    "repair": "txnkv.cli.repair",
    "demo": "txnkv.cli.demo",
}


@click.group(cls=Group, homes=_HOMES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="txnkv")
def main() -> None:
    """Tables and topics with transactions, in a directory.

    STORE is the directory of a store, as `shop` or `data/shop`.
    """


__all__ = ["main"]
