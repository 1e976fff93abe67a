"""`txnkv topics, produce, consume`, and what `txnkv txn` says of messages."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import txnkv
from txnkv.cli.console import duration
from txnkv.cli.message_lines import lines_of
from txnkv.topics import outbox


@pytest.fixture
def messages(store):
    """A topic `events` of two partitions, 0 with a, b, and 1 with c, of the key k."""
    with txnkv.connect(store) as client:
        events = client.create_topic("events", partitions=2)
        with client.transaction() as txn:
            txn.send(events, b"a", partition=0)
            txn.send(events, b"b", partition=0)
            txn.send(events, b"c", key=b"k", partition=1, headers=[("h", b"x")])
    return store


@pytest.fixture
def held(messages, monkeypatch):
    """That, and an open transaction with a message behind b, and one of another behind it."""
    with txnkv.connect(messages) as client:
        client.create_topic("aside", buffer="sidecar")
        txn = client.new_transaction(timeout=600)
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "MAX_BYTES", -1)
            txn.send("events", b"open", partition=0)
            txn.send("aside", b"waits")
            txn.send("aside", b"waits, too")
            txn.flush()
        with client.new_session() as session:
            session.send("events", b"behind", partition=0)
            session.send("aside", b"not held")
        yield messages, txn.id.local
        txn.rollback()


# -- produce and consume ---------------------------------------------------------------


CONTENT = st.none() | st.binary(max_size=5) | st.text(max_size=5).map(str.encode)
SENT = st.tuples(
    CONTENT,
    CONTENT,
    st.none() | st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2),
    st.none() | st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
)


@given(messages=st.lists(SENT, max_size=8), form=st.sampled_from([(None, True), (b"=", False)]))
@settings(max_examples=40, deadline=None)
def test_lines_by_columns_say_what_messages_say(shared, messages, form):
    shared.drop_topic("t", missing_ok=True)
    topic = shared.create_topic("t")
    with shared.transaction() as txn:
        for value, key, headers, timestamp in messages:
            txn.send(topic, value, key, headers=headers, timestamp=timestamp)
    rows = topic.consumer().poll(timeout=0)
    assert len(rows) == len(messages)
    batch = topic.consumer().poll_batch(timeout=0)
    assert bytes(lines_of(batch, *form)) == lines_of(rows, *form)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
@pytest.mark.parametrize("together", [(), ("--transaction",)])
def test_lines_in_and_out(store, run, buffer, together):
    lines = "".join(f"line {i}\n" for i in range(5000)) + "\n" + "no end"
    made = ("--partitions", 1, "--buffer", buffer, "--compression", "lz4")
    ran = run("produce", store, "t", *made, *together, input=lines)
    assert ran.out.startswith("sent 5,002 messages to t in ")
    assert run("consume", store, "t").out == lines + "\n"
    found = run("topics", store, "t", "--json").json
    assert (found["buffer"], found["compression"]) == (buffer, "lz4")


def test_a_topic_that_is_made_with_retention(store, run):
    run("produce", store, "t", "--partitions", 1, "--retention-bytes", 5 << 20,
        "--retain-unacknowledged", input="1\n")  # fmt: skip
    found = run("topics", store, "t", "--json").json
    assert (found["retention_bytes"], found["retain_unacknowledged"]) == (5 << 20, True)
    assert "and what is not acknowledged" in run("topics", store, "t").out


def test_a_topic_that_keeps_the_last_message_of_each_key(store, run):
    made = ("--cleanup", "compact", "--tombstone-seconds", 60, "--segment-bytes", 1000)
    run("topics", "create", store, "t", *made, "--segment-seconds", 3600)
    found = run("topics", store, "t", "--json").json
    assert (found["cleanup"], found["tombstone_seconds"]) == ("compact", 60)
    assert "keeps everything, the last message of each key" in run("topics", store, "t").out
    run("produce", store, "t", "--key-separator", ":", input="a:1\nb:2\na:3\n")
    assert "left out 1 message that others hide" in run("compact", store).out
    assert run("consume", store, "t").out == "2\n3\n"
    with txnkv.connect(store) as client:
        options = client.topic("t").info.options
        assert (options.segment_bytes, options.segment_seconds) == (1000, 3600)
    altered = run("topics", "alter", store, "t", "--cleanup", "delete", "--tombstone-seconds", 5)
    assert "delete" in altered.out


def test_many_lines_over_partitions(store, run):
    lines = [f"{i} {'x' * (i % 50)}" for i in range(60_000)]
    run("produce", store, "t", "--partitions", 3, input="\n".join(lines))
    assert sorted(run("consume", store, "t").out.splitlines()) == sorted(lines)


def test_files(store, run, file, fail):
    first, second = file("a.txt", "1\n2\n"), file("b.txt", "3")
    run("produce", store, "t", first, second, "--partitions", 1)
    assert run("consume", store, "t").out == "1\n2\n3\n"
    assert "c.txt: No such file" in fail("produce", store, "t", first.with_name("c.txt"))


def test_keys(store, run, fail):
    lines = "eu:9.5\nus:3:0\n:none\n"
    run("produce", store, "t", "-k", ":", "--partitions", 4, input=lines)
    out = run("consume", store, "t", "-k", "\\t").out
    assert sorted(out.splitlines()) == sorted(["eu\t9.5", "us\t3:0", "\tnone"])
    found = fail("produce", store, "t", "-k", ":", input="a:b\nno key\n")
    assert found == "stdin: line 2 has no ':' between key and value: no key"


def test_all_of_a_message_as_json(messages, run):
    found = run("consume", messages, "events", "--json", "-p", 1).lines
    assert datetime.fromisoformat(found[0].pop("timestamp")).tzinfo == UTC
    assert found[0].pop("txn_id") > 0
    assert found == [
        {"partition": 1, "offset": 0, "key": "k", "value": "c", "headers": [["h", "x"]]}
    ]


def test_json_goes_round(store, run):
    lines = [
        {"value": "v"},
        {"value": None, "key": "k"},
        {
            "value": {"base64": "/wA="},
            "key": {"base64": "/w=="},
            "headers": [["n", "x"], ["n", ""]],
        },
        {"value": "früh", "timestamp": "2026-01-31T12:00:00.5+00:00", "headers": {"one": "1"}},
    ]
    text = "\n".join(map(json.dumps, lines)) + "\n\n"
    ran = run("produce", store, "t", "--json", "--partitions", 1, input=text)
    assert (ran.json["topic"], ran.json["sent"]) == ("t", 4)
    out = run("consume", store, "t", "--json")
    run("produce", store, "copy", "--json", "--partitions", 1, input=out.out)
    for found in (out.lines, run("consume", store, "copy", "--json").lines):
        assert [each["value"] for each in found] == [each["value"] for each in lines]
        assert [each["key"] for each in found] == [None, "k", {"base64": "/w=="}, None]
        assert [each["headers"] for each in found] == [
            [],
            [],
            [["n", "x"], ["n", ""]],
            [["one", "1"]],
        ]
        assert found[3]["timestamp"] == "2026-01-31T12:00:00.500000+00:00"


def test_values_that_are_json_themselves(store, run):
    lines = '{"value": {"total": 9.5}}\n{"value": [1, 2]}\n{"value": 7}\n'
    run("produce", store, "t", "--json", "--partitions", 1, input=lines)
    assert run("consume", store, "t").out == '{"total": 9.5}\n[1, 2]\n7\n'


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("plain", "Expecting value"),
        ("[1]", "write an object"),
        ('{"key": "k"}', "it has the fields 'key'"),
        ('{"value": "v", "valeu": 1}', "it has the fields 'value', 'valeu'"),
        ('{"value": {"base64": "?"}}', "base64"),
        ('{"value": "v", "timestamp": "2026-01-31T12:00:00"}', "has no time zone"),
        ('{"value": "v", "timestamp": "noon"}', "isoformat"),
        ('{"value": "v", "headers": ["x"]}', "line 2 is no message"),
    ],
)
def test_a_line_that_is_no_message_is_named(messages, fail, run, line, why):
    found = fail("produce", messages, "events", "--json", input=f'{{"value": "v"}}\n{line}\n')
    assert found.startswith("stdin: line 2 is no message: ")
    assert why in found


def test_a_bad_line_undoes_a_transaction(messages, fail, run):
    lines = '{"value": "v"}\n' * 100_000 + "plain\n"
    fail("produce", messages, "events", "--json", "--transaction", input=lines)
    assert len(run("consume", messages, "events").out.splitlines()) == 3


def test_what_cannot_be_sent_to(messages, fail, misuse):
    assert "give --partitions N to make it" in fail("produce", messages, "others", input="x")
    assert "numbered from 0 to 1" in misuse("produce", messages, "events", "-p", 2)
    assert "`txnkv init` makes one" in fail("produce", messages / "x", "events", input="x")
    assert "exclude each other" in misuse("produce", messages, "events", "--json", "-k", ":")
    assert "is empty" in misuse("produce", messages, "events", "-k", "")


def test_where_to_begin(messages, run, fail, misuse):
    assert run("consume", messages, "events", "-p", 0, "--from", 1).out == "b\n"
    assert run("consume", messages, "events", "--from", "latest").out == ""
    assert run("consume", messages, "events", "-p", 0, "-n", 1).out == "a\n"
    assert run("consume", messages, "events", "-n", 0).out == ""
    assert len(run("consume", messages, "events", "--from", "2020-01-01T00:00Z").out) == 6
    assert run("consume", messages, "events", "--from", "2100-01-01T00:00Z").out == ""
    assert "neither earliest" in misuse("consume", messages, "events", "--from", "noon")
    assert "no time zone" in misuse("consume", messages, "events", "--from", "2026-01-01")
    assert "no partition 2" in misuse("consume", messages, "events", "-p", 2)
    assert "there is no topic" in fail("consume", messages, "others")


def test_isolation_and_order(held, run, misuse):
    store, _ = held
    asked = ("consume", store, "events", "-p", 0)
    assert run(*asked).out == "a\nb\n"
    assert run(*asked, "--isolation", "read_uncommitted").out == "a\nb\nopen\nbehind\n"
    assert run(*asked, "--order", "commit").out == "a\nb\nbehind\n"
    assert run(*asked, "--isolation", "serializable").out == "a\nb\nbehind\n"
    assert run("consume", store, "aside").out == "not held\n"
    assert run(*asked, "-s", "s", "-n", 2, "--order", "commit").out == "a\nb\n"
    assert run(*asked, "-s", "s").out == "behind\n"
    assert run(*asked, "-s", "u", "--isolation", "read_uncommitted").out.endswith("open\nbehind\n")
    refused = misuse(*asked, "-s", "s", "--isolation", "serializable")
    assert "isolation of a subscription" in refused


@pytest.mark.parametrize("kind", [(), ("--shared",)])
def test_a_subscription_goes_on_where_it_was(messages, run, kind):
    asked = ("consume", messages, "events", "-s", "mailer", *kind)
    first = run(*asked, "-n", 2).out.splitlines()
    rest = run(*asked).out.splitlines()
    assert (len(first), sorted(first + rest)) == (2, ["a", "b", "c"])
    assert run(*asked).out == ""
    run("produce", messages, "events", "-p", 0, input="d")
    (found,) = run("topics", messages, "events", "--json").json["subscriptions"]
    assert (found["name"], found["lag"], found["lag_by_partition"]) == ("mailer", 1, [1, 0])
    assert "mailer 1" in run("topics", messages).out
    assert run(*asked).out == "d\n"


def test_subscription_misuse(messages, misuse):
    assert "--shared is for" in misuse("consume", messages, "events", "--shared")
    assert "takes no time" in misuse(
        "consume", messages, "events", "-s", "s", "--from", "2020-01-01T00:00Z"
    )


def test_following(messages):
    """In processes of their own, by a pipe that stays open: lines come as they are sent."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    program = (sys.executable, "-m", "txnkv")
    with subprocess.Popen(
        [*program, "consume", str(messages), "events", "-f", "-p", "0", "--from", "latest"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as reader, subprocess.Popen(
        [*program, "produce", str(messages), "events", "-p", "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as writer:  # fmt: skip
        assert reader.stdout is not None
        assert writer.stdin is not None
        # The reader's latest is where it began; what is sent before may be behind it.
        for number in range(600):
            writer.stdin.write(f"{number}\n")
            writer.stdin.flush()
            ready, _, _ = select.select([reader.stdout], [], [], 0.1)
            if ready:
                break
        writer.stdin.close()
        assert writer.wait(60) == 0
        reader.send_signal(signal.SIGINT)
        out, err = reader.communicate(timeout=300)
        assert (reader.returncode, err) == (130, "stopped; reading changes nothing\n")
        heard = [int(line) for line in out.split()]
        assert heard
        assert heard == list(range(heard[0], heard[0] + len(heard)))


# -- looking on ------------------------------------------------------------------------


def test_topics(messages, run, store):
    found = run("topics", messages, "--json").json
    assert [each["name"] for each in found] == ["events"]
    ends = [(each["start"], each["end"]) for each in found[0]["partitions"]]
    assert ends == [(0, 2), (0, 1)]
    out = run("topics", messages).out
    assert out.splitlines()[2].split()[:4] == ["events", "marker", "2", "3"]
    assert "holds back" not in out


def test_no_topics(store, run, fail):
    assert run("topics", store).out == "no topics\n"
    assert run("topics", store, "--json").json == []
    for name in ("x", ""):
        assert f"there is no topic {name!r}" in fail("topics", "list", store, name)


def test_retention_is_told(store, run):
    with txnkv.connect(store) as client:
        client.create_topic("t", retention_seconds=7200, retention_bytes=1 << 20)
    assert "keeps 2 h 0 min and 1.0 MiB" in run("topics", store, "t").out
    assert run("topics", store, "t", "--json").json["retention_seconds"] == 7200


def test_who_holds_back_and_how_to_end_it(held, run):
    store, id = held
    line = f"transaction {id} holds back events/0 at 2, with 2 offsets there, since "
    end = f"if nobody will end it: txnkv txn abort {store} {id}"
    for args in (("topics", store), ("topics", store, "events")):
        out = run(*args).out
        assert line in out
        assert end in out
    found = {each["name"]: each for each in run("topics", store, "--json").json}
    partition = found["events"]["partitions"][0]
    assert (partition["last_stable_offset"], partition["end"]) == (2, 4)
    assert partition["held_back_by"] == id
    assert partition["open"] == [{"id": id, "first_offset": 2, "messages": None}]
    (aside,) = found["aside"]["partitions"]
    assert aside["held_back_by"] is None
    assert aside["open"] == [{"id": id, "first_offset": None, "messages": 2}]
    assert f"transaction {id}" in run("topics", store, "events").out.splitlines()[4]


def test_txn_list_tells_partitions_first_offsets_and_open_time(held, run):
    store, id = held
    out = run("txn", "list", store, "--state", "open").out
    assert "events/0 @2*" in out
    assert "aside/0 +2" in out
    assert " s of 600 s" in out
    assert f"transaction {id} holds back events/0 at 2, open for " in out
    assert f"txnkv txn abort {store} {id}" in out
    (info,) = run("txn", "list", store, "--state", "open", "--json").json
    assert info["open_seconds"] > 0
    places = {each["topic"]: each for each in info["messages"]}
    assert places["events"] == {
        "topic": "events", "partition": 0, "first_offset": 2, "messages": None, "holds_back": True,
    }  # fmt: skip
    assert places["aside"] == {
        "topic": "aside", "partition": 0, "first_offset": None, "messages": 2, "holds_back": False,
    }  # fmt: skip
    shown = run("txn", "show", store, id).out
    assert "events/0 @2*" in shown
    assert "txnkv txn abort" in shown


def test_truncate_from_either_end(messages, run):
    with txnkv.connect(messages) as client:
        client.run(lambda txn: txn.send("events", b"d", partition=0))
    told = run("topics", "truncate", messages, "events", "--after", 1, "-p", 0, "--yes", "--json")
    assert told.json == {"name": "events", "ends": {"0": 3}}
    assert run("consume", messages, "events", "-p", 0).out == "a\nb\n"
    told = run("topics", "truncate", messages, "events", "--before", 1, "-p", 0, "--yes")
    assert told.out == "events begins: partition 0 at 1\n"
    assert run("consume", messages, "events", "-p", 0).out == "b\n"
    told = run("topics", "truncate", messages, "events", "--after", -1, "-p", 1, "--yes")
    assert told.out == "events ends: partition 1 at 1\n"
    assert run("consume", messages, "events", "-p", 1).out == ""


def test_txn_abort_ends_what_holds_back(messages, run, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_BYTES", -1)
    with txnkv.connect(messages) as client:
        txn = client.new_transaction()
        txn.send("events", b"open", partition=0)
        txn.flush()
        with client.new_session() as session:
            session.send("events", b"behind", partition=0)
        run("txn", "abort", messages, txn.id.local)
        assert run("consume", messages, "events", "-p", 0).out == "a\nb\nbehind\n"
        assert "holds back" not in run("topics", messages).out
        assert run("txn", "list", messages, "--state", "open").out == "no transactions\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_json_in_a_message_is_kept_as_it_is_written(store, run, fail):
    lines = '{"key": 1.50, "value": {"a": 123456789012345678.91, "a": 1e400}}\n'
    run("produce", store, "e", "--partitions", 1, "--json", input=lines)
    line = run("consume", store, "e", "-k", "=").out
    assert line == '1.50={"a": 123456789012345678.91, "a": 1e400}\n'
    for number in ('"x"', "true", "1.5"):
        wrong = f'{{"value": "v", "partition": {number}}}'
        assert "is no whole number" in fail("produce", store, "e", "--json", input=wrong)
