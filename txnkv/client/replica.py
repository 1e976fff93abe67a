"""A follower: a store that copies the topics of another one, and goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from txnkv.client.client import Client
from txnkv.client.opening import connect
from txnkv.coordinator import Timestamp, reach
from txnkv.errors import NotSupportedError, TopicExistsError, require_count
from txnkv.storage import MaintenanceLock, shielded
from txnkv.topics import Follower, TopicEngine, TopicInfo, ValueStage

FETCH_BYTES: Final = 4 << 20

StoreLike = str | os.PathLike[str] | Client


@dataclass(frozen=True)
class Replicated:
    """The result of a run of `replicate`.

    Attributes:
        snapshot: all that committed in the source at or below it is in the copies, whole.
        high_watermarks: of the copies now, by topic, a list over the partitions.
        copied_bytes: of the batches that came in this run.
    """

    snapshot: Timestamp
    high_watermarks: dict[str, list[int]]
    copied_bytes: int


@shielded
def replicate(
    src: StoreLike,
    dest: StoreLike,
    *,
    topics: Sequence[str] | None = None,
    max_bytes: int = FETCH_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Replicated:
    """Bring the copies of a store's topics up to where the topics are now.

    Call it again, as often as the copies should be fresh: each run goes on where the one before
    stopped, or died. One run at a time fills a store; another waits. Topics are made in `dest` as
    they are in `src`; nobody else can write to them. Each copy has the same batches at the same
    offsets, open and aborted transactions among them, builds its own last stable offset and
    aborted index from them, and gives up what the source gave up or was truncated by. Readers of
    `dest` see each run's progress as it comes, up to a high watermark of its own; a serializable
    consumer sees whole transactions up to `snapshot`.

    **Left out**: tables and their rows, the status of transactions, subscriptions with their
    cursors, producers and what they sent last. A topic that is dropped in `src` stays in `dest`.
    Transactions over tables and topics are thus not whole in `dest`; `client.backup` copies a
    store as it is.

    Args:
        src: the source: a directory, or a client of it.
        dest: the follower: a directory, made when it is missing, or a client of it.
        topics: names; all topics by default.
        max_bytes: of one fetch.
        progress: called with the number of bytes of each step.

    Raises:
        StoreNotFoundError: there is no store at `src`.
        TopicNotFoundError: one of `topics` is not there.
        TopicExistsError: `dest` has a topic of that name that is no copy of this one, or the
            copy of one that was dropped in `src`: drop it in `dest` first.
        NotSupportedError: one of them is a client of a server.
        StorageFullError: the disk of `dest` is full. What was copied stays; run it again.
        ValueError: `src` and `dest` are the same store.
    """
    require_count("max_bytes", max_bytes, "bytes")
    with ExitStack() as stack:
        source = src if isinstance(src, Client) else stack.enter_context(connect(src, create=False))
        _require_here(source)
        follower = dest if isinstance(dest, Client) else stack.enter_context(connect(dest))
        _require_here(follower)
        if source.instance.store is follower.instance.store:
            raise ValueError(f"{source.path} cannot follow itself: name another store")
        lock = MaintenanceLock(Path(follower.path) / "follow.lock", through_forks=True)
        stack.callback(lock.close)
        with lock.hold():
            return _replicate(source, follower, topics, max_bytes, progress or (lambda _: None))


def _require_here(client: Client) -> None:
    if client.elsewhere is not None:
        raise NotSupportedError(
            f"{client.path} is another host's store: run txnkv.replicate there, with the store's "
            "directory"
        )


def _replicate(
    source: Client,
    follower: Client,
    names: Sequence[str] | None,
    max_bytes: int,
    progress: Callable[[int], None],
) -> Replicated:
    origins, copies = source.instance.topics, follower.instance.topics
    snapshot = source.instance.coordinator.latest()
    marks: dict[str, list[int]] = {}
    copied = 0
    for name in origins.names() if names is None else names:
        topic = origins.get(name)
        copy = _copy_of(topic, source.instance.store.store_id, copies)
        marks[name] = []
        agree_on_values = partial(_agree_on_values, origins, topic, copies, copy)
        pairs = zip(origins.partitions(topic), copies.partitions(copy), strict=True)
        for origin, partition in pairs:
            each = Follower(origins, origin, copies, partition, max_bytes, agree_on_values)
            each.agree()
            for size in each.catch_up():
                copied += size
                progress(size)
            marks[name].append(each.end)
    _reached(follower, snapshot)
    return Replicated(snapshot, marks, copied)


def _copy_of(topic: TopicInfo, source_id: str, copies: TopicEngine) -> TopicInfo:
    options = replace(topic.options, replica_of=source_id, replica_topic=topic.id)
    found = copies.find(topic.name)
    if found is None:
        return copies.create(topic.name, len(topic.partitions), topic.buffer, options)
    first = found.options.replica_topic
    if found.options.replica_of == source_id and first not in (None, topic.id):
        raise TopicExistsError(
            f"topic {topic.name!r} of store {source_id} was dropped and made anew since it was "
            f"copied: what the follower has is another topic. Drop it there with "
            f"drop_topic({topic.name!r}) and replicate again; its consumers begin anew"
        )
    there = len(topic.partitions)
    same = len(found.partitions) <= there and found.buffer == topic.buffer
    if found.options.values == options.values[: len(found.options.values)]:  # it had them since
        found = _with_values(found, options.values, copies)
    alike = replace(options, altered=found.options.altered, **found.options.changeable)
    if replace(found.options, replica_topic=topic.id) != alike or not same:
        raise TopicExistsError(
            f"the follower has a topic {topic.name!r} that is no copy of that of store {source_id}:"
            " drop it there, or leave this one out with topics=[...]"
        )
    if found.options.changeable != options.changeable or len(found.partitions) < there:
        found = copies.alter(found, options.changeable, there)  # as it was there since
    return found


def _with_values(copy: TopicInfo, stages: Sequence[ValueStage], copies: TopicEngine) -> TopicInfo:
    if copy.options.values == stages:
        return copy
    return copies.alter(copy, {}, None, lambda _: stages)


def _agree_on_values(
    origins: TopicEngine, topic: TopicInfo, copies: TopicEngine, copy: TopicInfo
) -> None:
    """Give a copy the schemas of values that its source has by now, before it gets values."""
    if topic.options.codec is not None:
        stages = origins.current(topic).options.values
        _with_values(copies.current(copy), stages, copies)


def _reached(follower: Client, snapshot: Timestamp) -> None:
    """Let snapshots of the follower be at least as late as what was copied."""
    with follower.instance.store.status.write() as cur:
        reach(cur, snapshot)
