"""Makes the tools importable; plays scripts on one store a module, each with a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import txnkv
from tests import internals

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tools.children import Children
from tools.isolation.interleaving import SCHEMA, Actor, Elsewhere, Player, play

BOTH = """
    1 begin
    2 begin
"""


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts") / "store"


@pytest.fixture(scope="module")
def shared_client(shared_path: Path) -> Iterator[txnkv.Client]:
    """A client of one store for all cases; the store is checked at the end."""
    with txnkv.connect(shared_path) as opened:
        yield opened
        assert opened.check().problems == []


@pytest.fixture(scope="module")
def other_process(shared_client: txnkv.Client, shared_path: Path) -> Iterator[Elsewhere]:
    with Children() as children:
        yield Elsewhere(children, shared_path)


@pytest.fixture
def perform(shared_client: txnkv.Client, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Plays a script on a table of its own. With `begun`, 1 and 2 begin before it."""

    def run(script: str, level: str, cast: str, begun: bool = True) -> None:
        client = shared_client
        name = f"t{len(client.tables())}"
        client.create_table(name, SCHEMA)
        outside = Player(client, name, level)
        for row in ("1 10", "2 20"):
            key, value = row.split()
            op = f"load insert {key}..{key} {value}" if cast == "on disk" else f"plain insert {row}"
            assert outside.do(op) == "ok"
        if cast == "on disk":
            internals.flush(client)
        sizes = cast.split(", ") if "," in cast else [cast] * 2
        actors = {
            who: Actor(Player(client, name, level, size).do)
            for who, size in zip("123", [*sizes, "small"], strict=True)
        }
        actors["outside"] = Actor(outside.do)
        if cast == "elsewhere":
            other: Elsewhere = request.getfixturevalue("other_process")
            other.enter(name, level)
            actors["2"] = Actor(other.do)
        play(BOTH * begun + script, actors, level, outside.do_rows)

    return run
