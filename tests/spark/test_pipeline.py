"""The programs of the pipeline, one by one and together, killed and not."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from examples.demo.pipeline import feed, layout, mail, run
from examples.demo.pipeline.checking import claims
from examples.demo.pipeline.reading import read
from examples.demo.pipeline.watch import Window
from examples.demo.sources import find_input


@pytest.fixture
def client(connect):
    client = connect()
    layout.make(client)
    return client


@pytest.fixture
def text(tmp_path):
    directory = tmp_path / "text"
    directory.mkdir()
    return directory


def lines_of(client):
    with client.topic(layout.LINES).consumer() as consumer:
        found = consumer.poll(max_messages=1_000_000, timeout=0.2)
    return [(message.key.decode(), message.value.decode()) for message in found]


def test_feed_sends_whole_lines_once(client, text):
    (text / "a").write_text("one\ntwo\nhal")
    assert feed.feed(client, text) == 2
    assert feed.feed(client, text) == 0
    with (text / "a").open("a") as file:
        file.write("f\n\n")
    (text / "below").mkdir()
    (text / "below" / "b").write_text("three\n")
    assert feed.feed(client, text) == 3
    assert sorted(lines_of(client)) == [
        *[("a", line) for line in ("", "half", "one", "two")],
        ("below/b", "three"),
    ]


def test_feed_goes_on_after_a_block(client, text, monkeypatch):
    monkeypatch.setattr(feed, "MOST", 8)
    (text / "a").write_text("one\ntwo\n0123456789\nend\n")
    feed.feed(client, text)
    assert [line for _, line in lines_of(client)] == ["one", "two", "01234567", "89", "end"]


@pytest.mark.parametrize("new", ["x\n", "other and longer\n"])
def test_feed_reads_another_file_from_its_beginning(client, text, capsys, new):
    (text / "a").write_text("one\ntwo\n")
    feed.feed(client, text)
    (text / "new").write_text(new)
    os.replace(text / "new", text / "a")
    assert feed.feed(client, text) == 1
    assert "a is another file now" in capsys.readouterr().err
    assert lines_of(client)[-1] == ("a", new.strip())


def test_feed_killed_at_any_moment_loses_and_doubles_nothing(client, text, tmp_path):
    expected = [f"line {number}" for number in range(20_000)]
    with (text / "a").open("w") as file:
        for kill in range(4):
            file.write("\n".join(expected[kill * 5000 : (kill + 1) * 5000]) + "\n")
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "examples.demo.pipeline.feed", client.path, str(text)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            before = client.topic(layout.LINES).end_offsets()
            while client.topic(layout.LINES).end_offsets() == before:
                assert process.poll() is None, process.stdout.read()
                time.sleep(0.01)
            process.kill()
            process.communicate()
    feed.feed(client, text)
    assert [line for _, line in lines_of(client)] == expected


def test_mail_notes_each_alert_once(client, capsys):
    with client.transaction() as txn:
        for word in ("self", "def"):
            txn.send(layout.ALERTS, "1000", key=word)
    with client.topic(layout.ALERTS).subscribe(layout.MAILER) as subscription:
        mail.mail(client, subscription)
        mail.mail(client, subscription)
    assert capsys.readouterr().out.splitlines() == [
        "To: editors. 'self' was written 1,000 times",
        "To: editors. 'def' was written 1,000 times",
    ]
    mails = sorted((row["word"], row["total"]) for row in client.table(layout.MAILS).scan())
    assert mails == [("def", 1000), ("self", 1000)]


def test_window_shows_what_is_there(client, text):
    window = Window()
    window.add(read(client))
    (text / "a").write_text("one\ntwo\n")
    feed.feed(client, text)
    with client.transaction() as txn:
        txn.serialize()  # others may join: what it sends goes into the log
        txn.send_batch(layout.LINES, pa.table({"value": [b"three"], "partition": [0]}))
        reading = read(client)
    window.add(reading)
    console = Console(width=100, file=io.StringIO())
    console.print(window.render([("feed", "runs"), ("count", "killed")]))
    shown = console.file.getvalue()
    assert reading.offsets(layout.LINES) == 3
    assert len(reading.open) == 1
    assert "1 wait for an open transaction" in shown
    assert str(reading.open[0].id) in shown
    assert "count killed" in shown
    assert "lines 3" in window.plain()


def test_a_wrong_total_is_found(client, text):
    (text / "a").write_text("word " * 100 + "\n")
    feed.feed(client, text)
    with client.transaction() as txn:
        txn.insert(layout.COUNTS, {"word": "word", "total": 99})
        txn.insert(layout.MAILS, {"word": "word", "total": 100})
        txn.send(layout.ALERTS, "100", key="word")
        txn.send(layout.ALERTS, "100", key="word")
    found = [claim.holds for claim in claims(client, text)]
    assert found == [True, False, False, True, True]


def test_no_place_for_a_store(tmp_path):
    with pytest.raises(ValueError, match="is there already"):
        run.run(None, str(tmp_path), False, 1.0, 0, None)


@pytest.mark.slow
@pytest.mark.spark
def test_the_whole_killed_at_random(tmp_path):
    outcome = run.run(None, str(tmp_path / "store"), False, 60.0, 8, None)
    assert sum(outcome.kills.values()) == 8
    assert outcome.holds, [claim for claim in outcome.claims if not claim.holds]
    assert not list(Path(tmp_path).glob("txnkv-pipeline-*"))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("host", ["elsewhere"], indirect=True)
def test_the_whole_killed_over_a_server(client, store_path, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    outcome = run.Outcome("", client.path, True)
    run.Run(root, store_path, find_input(None), 60.0, 8, None, client.path).run(outcome)
    assert sum(outcome.kills.values()) == 8
    assert outcome.holds, [claim for claim in outcome.claims if not claim.holds]
