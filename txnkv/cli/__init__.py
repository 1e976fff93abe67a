"""The command line: `txnkv`, or `python -m txnkv`.

People get tables, programs get JSON (`--json`). What goes wrong is one line on stderr; see
`command_group` for the exit statuses. Each command's module is loaded when it is called:

    store_commands, topic_commands, txn    a store, its topics and transactions, seen and mended
    group_commands                         who reads a topic, and how far
    top, ui                                all of that, live, in a terminal or a browser
    table_commands                         a table and single rows of it
    conditions, parsing                    what users type: conditions, schemas, times
    load, text_sources, text_types         files in
    scan_rows                              rows out
    messages_commands, message_lines       messages in and out
    serve                                  a store for other hosts
"""

from __future__ import annotations

import click

from txnkv import __version__
from txnkv.cli.command_group import Group

_HOMES = {
    "init": "txnkv.cli.store_commands",
    "load": "txnkv.cli.load",
    "scan": "txnkv.cli.scan_rows",
    "query": "txnkv.cli.scan_rows",
    "tables": "txnkv.cli.store_commands",
    "create": "txnkv.cli.table_commands",
    "alter": "txnkv.cli.table_commands",
    "index": "txnkv.cli.table_commands",
    "rename": "txnkv.cli.table_commands",
    "revert": "txnkv.cli.table_commands",
    "drop": "txnkv.cli.table_commands",
    "count": "txnkv.cli.table_commands",
    "get": "txnkv.cli.table_commands",
    "insert": "txnkv.cli.table_commands",
    "delete": "txnkv.cli.table_commands",
    "topics": "txnkv.cli.topic_commands",
    "produce": "txnkv.cli.messages_commands",
    "consume": "txnkv.cli.messages_commands",
    "group": "txnkv.cli.group_commands",
    "txn": "txnkv.cli.txn",
    "stats": "txnkv.cli.store_commands",
    "top": "txnkv.cli.top",
    "ui": "txnkv.cli.ui",
    "check": "txnkv.cli.store_commands",
    "compact": "txnkv.cli.store_commands",
    "backup": "txnkv.cli.store_commands",
    "restore": "txnkv.cli.store_commands",
    "dump": "txnkv.cli.store_commands",
    "repair": "txnkv.cli.store_commands",
    "serve": "txnkv.cli.serve",
    "demo": "txnkv.cli.demo",
}


@click.group(cls=Group, homes=_HOMES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="txnkv")
def main() -> None:
    """Tables and topics with transactions, in a directory.

    STORE is the directory of a store, as `shop` or `data/shop`.
    """


__all__ = ["main"]
