"""kill -9 in topics: what is decided is there, and a recovery that dies is recovered."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import txnkv
from tools import crash_topics
from tools.crash import GONE, TABLES, THERE, examine, run_child
from tools.crash_scenarios import BEFORE


@pytest.mark.parametrize("number", range(4))
def test_a_short_commit_is_done_once_it_is_decided(
    number: int, template: Path, tmp_path: Path
) -> None:
    """The log has no marker yet; the transaction's messages are visible all the same."""
    path = tmp_path / "store"
    shutil.copytree(template, path)
    assert run_child("topics_alone", path, f"marker.decided=kill@{number + 1}").killed
    with txnkv.connect(path, create=False) as client:
        partition = crash_topics.partitions(client)[number]
        wanted = [b"before", *(b"alone %d %d" % (number, i) for i in range(2))]
        assert crash_topics.committed(client, partition) == wanted
        assert client.check().problems == []


@pytest.mark.parametrize(
    ("first", "scenario", "outcome", "second"),
    [
        ("commit.decided", "topics_commit", THERE, "lmdb.before_commit"),
        ("commit.decided", "topics_commit", THERE, "log.completed"),
        ("commit.decided", "topics_commit", THERE, "marker.written"),
        ("commit.started", "topics_commit", THERE, "commit.in_point"),
        ("commit.started", "topics_commit", THERE, "log.completed"),
        ("abort.started", "topics_rollback", GONE, "marker.aborting"),
        ("abort.started", "topics_rollback", GONE, "marker.aborted"),
        ("abort.started", "topics_rollback", GONE, "lmdb.before_commit"),
    ],
)
def test_recovery_that_dies_is_recovered(
    first: str,
    scenario: str,
    outcome: str,
    second: str,
    template: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    shutil.copytree(template, path)
    assert run_child(scenario, path, f"{first}=kill").killed
    deaths = 0
    for number in range(1, 6):
        death = run_child("recover", path, f"{second}=kill@{number}")
        deaths += death.killed
    assert deaths > 0
    with txnkv.connect(path, create=False) as client:
        assert examine(client, death, outcome) == []
        there = client.table(TABLES[0]).get(BEFORE) is not None
        assert crash_topics.examine(client, death.said, there) == []


def test_a_reader_that_was_open_before_sees_what_was_acknowledged(
    template: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    shutil.copytree(template, path)
    with txnkv.connect(path, create=False) as before:
        partition = crash_topics.partitions(before)[0]
        assert crash_topics.committed(before, partition) == [b"before"]
        death = run_child("topics_small", path, "log.durable=kill@4")
        assert death.killed
        values = crash_topics.committed(before, partition)
        assert values == [b"before", *(b"small %d" % i for i in range(4))]
