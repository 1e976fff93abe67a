"""Histories as text, how they are recorded, and the program that checks a file of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.isolation import __main__ as program
from tools.isolation.checker import check
from tools.isolation.histories import Append, Outcome, Txn, dump, parse, record


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T1: x+1\nT1: x+2", "one name"),
        ("T1: x+1\nT2: x+1", "written twice"),
        ("T1: x+1\nT2: x=1", "both a list and a register"),
        ("T1 x+1", "no colon"),
        ("T1 often: x+1", "'often' is no part"),
        ("T1: x+1 x?", "'x\\?' begins with no operation"),
    ],
)
def test_what_is_no_history_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parse(text))


def test_text_comes_back() -> None:
    text = (
        "T1 @p1 1000-1250 s=40 c=44 ok: x+5 x[1 5] x[] y=- y:=-7 y=-7\n"
        "T2 @p2 1000- info: x+-6\n"
        "T3 fail: \n"
    )
    assert dump(parse(text)) == text


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history"
    path.write_text("T1: x[] y+1\nT2: y[] x+1\n")
    assert program.main([str(path)]) == 1
    assert "serializable does not hold" in capsys.readouterr().out
    assert program.main([str(path), "snapshot"]) == 0
    assert "2 transactions: snapshot holds" in capsys.readouterr().out
    assert program.main([str(path), "strict"]) == 2


def test_recording() -> None:
    history: list[Txn] = []
    with record(history, "p") as running:
        running.did(Append("x", 1))
        running.committed(7)
    with pytest.raises(KeyError), record(history, "p") as running:  # noqa: PT012
        running.snapshot = 5
        raise KeyError
    first, second = history
    assert (first.name, first.outcome, first.commit) == ("p_0", Outcome.COMMITTED, 7)
    assert first.ops == (Append("x", 1),)
    assert first.invoked is not None
    assert first.completed is not None
    assert first.invoked <= first.completed
    assert (second.name, second.outcome, second.completed) == ("p_1", Outcome.UNKNOWN, None)
    assert second.snapshot == 5
