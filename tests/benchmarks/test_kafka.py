"""Kafka as a peer: with a broker where TXNKV_TEST_KAFKA names one, and what needs none."""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("duckdb", reason="the peers of the benchmarks are not installed")

from benchmarks import kafka_clients
from benchmarks.__main__ import main  # only with the peers
from benchmarks.kafka_fetch import RawConsumer

BROKER = os.environ.get("TXNKV_TEST_KAFKA")
KINDS = {"kafka, synced", "kafka, not synced"}


def record_batch(first: int, count: int, body: bytes) -> bytes:
    """The header of a record batch and something after it: what a raw fetch looks at."""
    rest = struct.pack(">ibIhi", 0, 2, 0, 0, count - 1) + body
    return struct.pack(">qi", first, len(rest)) + rest


def serve(answer: bytes, heard: list[bytes]) -> socket.socket:
    """Somebody who takes one request and gives this answer."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = server.accept()
        with connection:
            (length,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            heard.append(connection.recv(length, socket.MSG_WAITALL))
            connection.sendall(struct.pack(">i", len(answer)) + answer)

    threading.Thread(target=run, daemon=True).start()
    return server


def fetched(error: int, batches: bytes, heard: list[bytes]) -> tuple[int, int]:
    answer = struct.pack(">iiih", 0, 0, 1, 3) + b"abc" + struct.pack(">i", 1)
    answer += struct.pack(">ihqqi", 0, error, 30, 20, 1) + struct.pack(">qq", 7, 12)
    answer += struct.pack(">i", len(batches)) + batches
    with serve(answer, heard) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with RawConsumer(where, "abc", committed=True) as consumer:
            return consumer.fetch(10, 1 << 20)


def test_a_raw_fetch_counts_whole_batches() -> None:
    whole = record_batch(10, 3, b"x" * 40) + record_batch(13, 2, b"y" * 50)
    heard: list[bytes] = []
    cut = record_batch(15, 9, b"z" * 60)[:70]
    assert fetched(0, whole + cut, heard) == (len(whole), 15)
    request = struct.pack(">hhih", 1, 4, 0, 11) + b"txnkv-bench"
    request += struct.pack(">iiiibi", -1, 0, 0, 1 << 20, 1, 1)
    request += struct.pack(">h", 3) + b"abc" + struct.pack(">iiqi", 1, 0, 10, 1 << 20)
    assert heard == [request]


def test_a_raw_fetch_of_nothing_stays_where_it_was() -> None:
    assert fetched(0, b"", []) == (0, 10)


def test_a_refused_fetch_says_so() -> None:
    with pytest.raises(RuntimeError, match="refused a fetch with error 3"):
        fetched(3, b"", [])


def test_without_the_client_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("confluent_kafka"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    result = CliRunner().invoke(main, ["produce", "--tiny", "--kafka", "127.0.0.1:9"])
    assert result.exit_code == 1
    assert "install confluent-kafka" in result.output


def test_clients_run_tiny(tmp_path: Path) -> None:
    """Against a server of ours, and beside a broker where one is named."""
    pytest.importorskip("confluent_kafka", exc_type=ImportError)
    out = tmp_path / "out.json"
    arguments = ["--tiny", "--rounds", "1", "--json", str(out), "--base", str(tmp_path)]
    arguments += ["--kafka", BROKER] if BROKER else []
    result = CliRunner().invoke(kafka_clients.main, arguments)
    assert result.exit_code == 0, "".join(traceback.format_exception(*result.exc_info or ()))
    names = {line["name"] for line in json.loads(out.read_text())}
    assert names == {kafka_clients.OURS} | (KINDS if BROKER else set())


@pytest.mark.skipif(BROKER is None, reason="TXNKV_TEST_KAFKA names no broker")
@pytest.mark.parametrize(
    ("name", "peers"),
    [
        ("produce", KINDS),
        ("fetch", {"kafka, read_uncommitted", "kafka, read_committed, 1% aborted"}),
        ("consume", {"kafka, consume"}),
        ("pass-on", KINDS),
    ],
)
def test_runs_tiny_beside_a_broker(name: str, peers: set[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [name, "--tiny", "--json", str(out), "--dir", str(tmp_path)]
    result = CliRunner().invoke(main, [*arguments, "--kafka", BROKER or ""])
    assert result.exit_code == 0, "".join(traceback.format_exception(*result.exc_info or ()))
    assert {line["name"] for line in json.loads(out.read_text())} >= peers
