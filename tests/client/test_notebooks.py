"""Handles in a notebook: grids of HTML, of what is there now."""

from __future__ import annotations

import re

import txnkv


def cells(html: str) -> list[list[str]]:
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_a_scan_shows_ten_rows(client: txnkv.Client) -> None:
    schema = txnkv.Schema(
        {"id": "int64", "s": "string?", "f": txnkv.Column("float64", default=0.5)}, ["id"]
    )
    table = client.create_table("t", schema)
    with client.transaction() as txn:
        for i in range(50):
            txn.insert(table, {"id": i, "s": "<b>" if i else None})
        scan = txn.scan(table, ordered=True)
        assert len(cells(scan._repr_html_())) == 11
    scan = table.scan(["id", "s"], ordered=True)
    shown = cells(scan._repr_html_())
    assert shown[:3] == [["id", "s"], ["0", ""], ["1", "&lt;b&gt;"]]
    assert len(shown) == 11
    assert scan._repr_html_().startswith("<div><code>&lt;Scan of &#x27;t&#x27;")
    assert len(cells(table.scan(where=[("id", "<", 3)])._repr_html_())) == 4
    assert len(cells(table.scan([], limit=2)._repr_html_())) == 3
    assert cells(table._repr_html_()) == [
        ["column", "type", "default", "key"],
        ["id", "int64", "", "1"],
        ["s", "string?", "", ""],
        ["f", "double", "0.5", ""],
    ]


def test_stores_topics_snapshots_and_transactions_are_shown(client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
    topic = client.create_topic("e", partitions=2)
    assert cells(client._repr_html_()) == [["kind", "name"], ["table", "t"], ["topic", "e"]]
    with client.transaction() as txn:
        txn.insert(table, (1,))
        txn.send(topic, b"x", partition=1)
        head, row = cells(txn._repr_html_())
        assert dict(zip(head, row, strict=True))["state"] == "OPEN"
    head, *rows = cells(topic._repr_html_())
    assert (head, rows) == (
        ["partition", "end", "last stable offset"], [["0", "0", "0"], ["1", "1", "1"]],
    )  # fmt: skip
    with client.snapshot() as snap:
        table.insert((2,))
        assert cells(snap._repr_html_()) == [["table", "rows"], ["t", "1"]]
    client.drop_table("t")
    client.close()
    for handle in (client, topic, txn, snap):
        assert handle._repr_html_() is None
        assert repr(handle).startswith("<")
