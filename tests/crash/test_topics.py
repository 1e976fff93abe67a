"""kill -9 in topics: what is decided is there for readers of before and after."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import txnkv
from tools import crash_topics
from tools.crash import run_child


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
