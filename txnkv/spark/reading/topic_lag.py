"""The lag of a query behind the topic that it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def lag(progress_or_query: Any, topic: str | None = None) -> dict[int, int]:
    """Offsets that a query has not read yet, by partition, as of its last progress.

    Args:
        progress_or_query: a `StreamingQuery`, or a `StreamingQueryProgress` of one.
        topic: the topic's name; None where the query reads one topic.

    Returns:
        The lags, none of them when there was no progress yet.

    Raises:
        ValueError: the query does not read this topic; or several, and none is named.
    """
    progress = getattr(progress_or_query, "lastProgress", progress_or_query)
    if progress is None:
        return {}
    found = [each for each in _sources(progress) if topic in (None, each[0]["topic"])]
    if len({end["topic"] for end, _ in found}) != 1:
        named = "a txnkv topic" if topic is None else f"topic {topic!r}"
        several = ", ".join(sorted({end["topic"] for end, _ in found}))
        raise ValueError(
            f"the query reads the topics {several}: name one" if several else
            f"the query does not read {named}"
        )  # fmt: skip
    lags: dict[int, int] = {}
    for end, latest in found:
        for number, offset in latest["offsets"].items():
            behind = max(offset - end["offsets"].get(number, 0), 0)
            lags[int(number)] = max(lags.get(int(number), 0), behind)
    return lags


def _sources(progress: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """End and latest offset of each source that is a topic."""
    for source in progress["sources"]:
        end, latest = (_offset(source[name]) for name in ("endOffset", "latestOffset"))
        if end is not None and latest is not None:
            yield end, latest


def _offset(given: Any) -> dict[str, Any] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return given if isinstance(given, dict) and {"topic", "offsets"} <= given.keys() else None
