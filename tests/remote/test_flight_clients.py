"""Clients of Arrow Flight that are not ours read tables, by tickets that they may write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import txnkv
from txnkv.server import Server, Users, add_user


def test_any_flight_client_reads_tables(store: txnkv.Client, serve: Callable[..., Server]) -> None:
    store.table("t").insert((1, "a"))
    store.table("t").insert((2, "b"))
    client = fl.FlightClient(f"grpc://127.0.0.1:{serve().port}")
    (info,) = client.list_flights()
    assert info.total_records == 2
    assert info.schema == store.table("t").schema.arrow
    found = client.get_flight_info(fl.FlightDescriptor.for_path("t"))
    assert client.do_get(found.endpoints[0].ticket).read_all().num_rows == 2
    asked = {"table": "t", "columns": ["v"], "where": [["id", ">", 1]]}
    read = client.do_get(fl.Ticket(json.dumps(asked).encode())).read_all()
    assert read.to_pylist() == [{"v": "b"}]
    assert client.get_schema(fl.FlightDescriptor.for_path("t")).schema == info.schema
    for ask, refused in (
        (client.get_flight_info, fl.FlightServerError),
        (client.get_schema, pa.ArrowInvalid),
    ):
        with pytest.raises(refused, match="no table 'none'"):
            ask(fl.FlightDescriptor.for_path("none"))
        with pytest.raises(refused, match="a path of one part"):
            ask(fl.FlightDescriptor.for_command(b"t"))


def test_who_has_no_right_to_a_table_is_not_told_its_schema(
    store: txnkv.Client, serve: Callable[..., Server], tmp_path: Path
) -> None:
    token = add_user(tmp_path / "users", "ann", "read", ["others"], ["*"])
    client = fl.FlightClient(f"grpc://127.0.0.1:{serve(Users(tmp_path / 'users')).port}")
    known = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
    for ask, refused in (
        (client.get_flight_info, fl.FlightUnauthorizedError),
        (client.get_schema, pa.ArrowInvalid),
    ):
        with pytest.raises(refused, match="no right to read"):
            ask(fl.FlightDescriptor.for_path("t"), known)
        with pytest.raises((fl.FlightUnauthenticatedError, OSError), match="wants a token"):
            ask(fl.FlightDescriptor.for_path("t"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"table": "t", "filter": [["id", ">", 1]]}, "a ticket has no 'filter'; it has table, col"),
        ({"table": "t", "Limit": 1}, "a ticket has no 'Limit'"),
        ({"table": "t", "column": ["v"]}, "a ticket has no 'column'"),
        ({"table": 5}, "`table` is a text"),
        ({"columns": ["v"]}, "the ticket names no table"),
        ({"table": "t", "where": ["id", ">", 1]}, "where is a list of lists"),
        ({"table": "t", "where": False}, "where is a list of lists"),
        ({"table": "t", "columns": {"id": 1}}, "columns is a list of names"),
        (["t"], "the ticket is no object"),
        ("t", "the ticket is no object"),
        (None, "the ticket is no object"),
    ],
)
def test_a_ticket_that_says_what_none_can_is_refused(
    store: txnkv.Client, serve: Callable[..., Server], asked: Any, words: str
) -> None:
    """One with a misspelt name gave the whole table."""
    store.table("t").insert((1, "a"))
    client = fl.FlightClient(f"grpc://127.0.0.1:{serve().port}")
    with pytest.raises(fl.FlightServerError, match=words):
        client.do_get(fl.Ticket(json.dumps(asked).encode())).read_all()
    with pytest.raises(fl.FlightServerError, match="the ticket is no JSON"):
        client.do_get(fl.Ticket(b"t")).read_all()
    whole = client.do_get(fl.Ticket(b' {"table": "t", "where": [], "limit": null}')).read_all()
    assert whole.num_rows == 1
