"""The graph of who depends on whom (Adya 1999).

ww    the second wrote the version after the first's         T1: x:=1    T2: x:=2
wr    the second read what the first wrote                   T1: x:=1    T2: x=1
rw    the first read the version before the second's         T1: x=1     T2: x:=2
so    one session ran the first, then the second
rt    the first was answered before the second was invoked
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Final

from tools.isolation.histories import Txn
from tools.isolation.versions import Key, following

__all__ = ["EDGE_WORDS", "Edge", "Graph", "graph_of"]


class Edge(IntFlag):
    WW = 1
    WR = 2
    RW = 4
    SO = 8
    RT = 16


EDGE_WORDS: Final = {Edge.WW: "ww", Edge.WR: "wr", Edge.RW: "rw", Edge.SO: "so", Edge.RT: "rt"}


@dataclass
class Graph:
    """Edges between transactions, which are positions in the history, and the reason of each."""

    edges: dict[int, dict[int, Edge]] = field(default_factory=dict)
    reasons: dict[tuple[int, int, Edge], str] = field(default_factory=dict)

    def add(self, first: int, second: int, edge: Edge, reason: str = "") -> None:
        if first != second:
            after = self.edges.setdefault(first, {})
            after[second] = after.get(second, Edge(0)) | edge
            self.reasons.setdefault((first, second, edge), reason)

    def after(self, first: int, kinds: Edge) -> Iterator[int]:
        """Those that an edge of one of these kinds leads to."""
        for second, edge in self.edges.get(first, {}).items():
            if edge & kinds:
                yield second


def graph_of(
    keys: Iterable[Key], history: Sequence[Txn], counted: Sequence[bool], order: str
) -> Graph:
    """The graph of all keys whose versions are in order; `order` is that of `following`."""
    graph = Graph()
    for key in keys:
        _add_key(graph, key, counted)
    place = {txn.name: at for at, txn in enumerate(history)}
    ended = [txn for at, txn in enumerate(history) if counted[at]]
    if order != "none":
        for before, after in following(ended, "session"):
            graph.add(place[before.name], place[after.name], Edge.SO)
    if order == "realtime":
        for before, after in following(ended, "realtime"):
            graph.add(place[before.name], place[after.name], Edge.RT)
    return graph


def _add_key(graph: Graph, key: Key, counted: Sequence[bool]) -> None:
    for version, afters in key.later.items():
        for after in afters:
            if version is not None:
                reason = f"{key.name}: {version} then {after}"
                graph.add(key.writer[version], key.writer[after], Edge.WW, reason)
    for at, version in key.reads.items():
        if version is not None and counted[key.writer.get(version, at)]:
            graph.add(key.writer.get(version, at), at, Edge.WR, f"{key.name}: {version}")
        shown = "-" if version is None else version
        for after in key.later.get(version, ()):
            reason = f"{key.name}: {shown} before {after}"
            graph.add(at, key.writer[after], Edge.RW, reason)
