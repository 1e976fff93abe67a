"""Cycles of who depends on whom, and their names.

A history is serializable when its graph has no cycle. It satisfies snapshot isolation when each
cycle has two rw edges one after the other (Cerone and Gotsman 2018): a snapshot may be older
than what others write, but who wrote upon an old snapshot cannot be seen from it.

    G0              a cycle of ww alone
    G1c             of ww and wr
    G-single        with one rw
    G-nonadjacent   with several, no two of which stand together
    G2-item         with two together: all that snapshot isolation leaves

Each strongly connected part is looked at with the dependencies alone, then with the order of
sessions, then with real time; a name stands without an ending when the first was enough. Beside
one of the first three the last two say nothing more, and are left out.

To find the first four at once, transactions are doubled: one by one that an rw edge was taken
to, from which no second rw edge leads on. A cycle of these has no two rw edges together.

    a -rw-> b -wr-> c -rw-> a        (a) -> (b, by rw) -> (c) -> (a, by rw), and no further
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from tools.isolation.dependencies import EDGE_WORDS, Edge, Graph
from tools.isolation.histories import Txn
from tools.isolation.versions import Anomaly

__all__ = ["cycles", "parts", "shortest"]

Node = TypeVar("Node", bound=Hashable)
Cycle = list[tuple[int, Edge]]
"""Each transaction with the kinds of the edge that leaves it; empty for none."""
State = tuple[int, bool]

_ANY: Final = Edge.WW | Edge.WR | Edge.RW | Edge.SO | Edge.RT
_LAYERS: Final = (
    ("", Edge(0)),
    ("-session", Edge.SO),
    ("-realtime", Edge.SO | Edge.RT),
)


def cycles(graph: Graph, history: Sequence[Txn]) -> Iterator[Anomaly]:
    """A short cycle of each name in each strongly connected part."""
    for part in parts(graph.edges, lambda node: graph.after(node, _ANY)):
        names: set[str] = set()
        for suffix, order in _LAYERS:
            for name, cycle in _in_layer(graph, set(part), order, names):
                names.add(name)
                txns = tuple(history[at].name for at, _ in cycle)
                yield Anomaly(name + suffix, _describe(graph, cycle, history), txns)


def _in_layer(
    graph: Graph, inside: set[int], order: Edge, names: set[str]
) -> Iterator[tuple[str, Cycle]]:
    depends = Edge.WW | Edge.WR | order
    doubled = list(parts(_states(inside), lambda at: _after_state(graph, inside, depends, at)))
    if doubled:
        suspects = {node for part in doubled for node, _ in part}
        for name, first, rest in (
            ("G0", Edge.WW, Edge.WW | order),
            ("G1c", Edge.WR, depends),
            ("G-single", Edge.RW, depends),
        ):
            if name not in names and (cycle := _through(graph, suspects, first, rest)):
                yield name, cycle
        if not names & {"G0", "G1c", "G-single", "G-nonadjacent"}:
            yield "G-nonadjacent", _not_together(graph, doubled[0], depends)
    if not names and (cycle := _together(graph, inside, depends)):
        yield "G2-item", cycle


def _through(graph: Graph, inside: set[int], first: Edge, rest: Edge) -> Cycle:
    """The shortest cycle of one `first` edge and then `rest` edges."""

    def after(node: int) -> Iterator[int]:
        return (other for other in graph.after(node, rest) if other in inside)

    best: list[int] = []
    for start in inside:
        for second in graph.after(start, first):
            path = shortest(second, start, after) if second in inside else []
            if path and not 0 < len(best) <= len(path):
                best = [path[-1], *path[:-1]]
        if len(best) == 2:
            break
    return [
        (node, graph.edges[node][_next(best, at)] & (rest if at else first))
        for at, node in enumerate(best)
    ]


def _states(inside: set[int]) -> list[State]:
    return [(node, by_rw) for node in inside for by_rw in (False, True)]


def _after_state(graph: Graph, inside: set[int], depends: Edge, at: State) -> Iterator[State]:
    node, by_rw = at
    for other in graph.after(node, depends):
        if other in inside:
            yield other, False
    if not by_rw:
        for other in graph.after(node, Edge.RW):
            if other in inside:
                yield other, True


def _not_together(graph: Graph, part: list[State], depends: Edge) -> Cycle:
    """A short cycle of a strongly connected part of the doubled graph."""
    members = set(part)
    nodes = {node for node, _ in part}

    def after(at: State) -> Iterator[State]:
        return (other for other in _after_state(graph, nodes, depends, at) if other in members)

    start = part[0]
    paths = (shortest(second, start, after) for second in after(start))
    path = min(filter(None, paths), key=len)
    found: Cycle = []
    for at, (node, _) in enumerate(path):
        other, by_rw = _next(path, at)
        found.append((node, graph.edges[node][other] & (Edge.RW if by_rw else depends)))
    return found


def _together(graph: Graph, inside: set[int], depends: Edge) -> Cycle:
    """A cycle that begins with two rw edges; one of two transactions when there is any."""
    kinds = depends | Edge.RW
    for first in inside:
        for second in graph.after(first, Edge.RW):
            if second in inside and graph.edges.get(second, {}).get(first, Edge(0)) & Edge.RW:
                return [(first, Edge.RW), (second, Edge.RW)]

    def within(node: int) -> Iterator[int]:
        return (other for other in graph.after(node, kinds) if other in inside)

    for part in parts(inside, within):
        members = set(part)
        for first in part:
            for second in members.intersection(graph.after(first, Edge.RW)):
                rest = members - {second}

                def after(node: int, rest: set[int] = rest) -> Iterator[int]:
                    return (other for other in graph.after(node, kinds) if other in rest)

                for third in rest.intersection(graph.after(second, Edge.RW)):
                    path = shortest(third, first, after)
                    if path:
                        nodes = [first, second, *path[:-1]]
                        return [
                            (
                                node,
                                graph.edges[node][_next(nodes, at)]
                                & (kinds if at > 1 else Edge.RW),
                            )
                            for at, node in enumerate(nodes)
                        ]
    return []


def _next(cycle: Sequence[Node], at: int) -> Node:
    return cycle[(at + 1) % len(cycle)]


def _describe(graph: Graph, cycle: Cycle, history: Sequence[Txn]) -> str:
    words = []
    for at, (node, edge) in enumerate(cycle):
        kind = next(kind for kind in EDGE_WORDS if kind & edge)
        reason = graph.reasons[node, _next(cycle, at)[0], kind]
        words.append(f"{history[node].name} -{EDGE_WORDS[kind]}{reason and f'({reason})'}->")
    return " ".join([*words, history[cycle[0][0]].name])


# -- any graph -----------------------------------------------------------------------------


def parts(nodes: Iterable[Node], after: Callable[[Node], Iterator[Node]]) -> Iterator[list[Node]]:
    """Strongly connected parts of more than one node (Tarjan 1972), without recursion."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    waiting: list[Node] = []
    on_stack: set[Node] = set()
    for root in list(nodes):
        work: list[tuple[Node, Iterator[Node]]] = []
        new: Node | None = None if root in index else root
        while work or new is not None:
            if new is not None:
                index[new] = low[new] = len(index)
                waiting.append(new)
                on_stack.add(new)
                work.append((new, after(new)))
            node, rest = work[-1]
            new = None
            for other in rest:
                if other not in index:
                    new = other
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            if new is not None:
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                part = [waiting.pop()]
                while part[-1] != node:
                    part.append(waiting.pop())
                on_stack.difference_update(part)
                if len(part) > 1:
                    yield part


def shortest(start: Node, goal: Node, after: Callable[[Node], Iterator[Node]]) -> list[Node]:
    """A shortest path, both ends included; empty when there is none."""
    came: dict[Node, Node | None] = {start: None}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if node == goal:
            path = [node]
            while (before := came[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for other in after(node):
            if other not in came:
                came[other] = node
                queue.append(other)
    return []
