"""Histories against the timestamps that the store named for them."""

from __future__ import annotations

from tests.scripts import scripts
from tools.isolation.histories import parse
from tools.isolation.replay import replay

PLANTED = scripts("""
== a list that lacks what its snapshot has
T1 s=0 c=5: x+1; T2 s=5: x[] -> not-at-snapshot
== a list that has what its snapshot lacks
T1 s=0 c=5: x+1; T2 s=4: x[1] -> not-at-snapshot
== an old register
T1 s=0 c=5: x:=1; T2 s=5 c=7: x:=2; T3 s=7: x=1 -> not-at-snapshot
== an aborted write
T1 s=0 fail: x:=1; T2 s=7: x=1 -> not-at-snapshot
== blind writes at once
T1 s=0 c=5: x:=1; T2 s=4 c=7: x:=2 -> overlapping-commits
== a commit that is answered and not in a later snapshot
T1 10-20 s=0 c=5: x:=1; T2 21-30 s=4: y=- -> late-snapshot
== one timestamp for two
T1 s=0 c=5: x:=1; T2 s=0 c=5: y:=1 -> equal-timestamps
== a transaction that does not know itself
T1 s=0 c=5: x:=1 x=- -> internal
""")

CLEAN = """
    T1 10-20 s=0 c=5: x:=1 y+1 y[1]
    T2 11-21 s=0 c=6: z:=1
    T3 22-30 s=6 c=9: x=1 z=1 y[1] y+2 x:=2
    T4 22-31 s=6: x=1 y[1]
    T5 22-40 fail: x:=7
    T6 20-30 s=0: x=-            # begun when T1 was answered, not after
    T7 40-50 s=9: x=2 y[1 2]
    T8 60- s=9 info: w:=1
    T9 70-80 s=9: w=1            # nobody knows when w was written
"""

SKEW = """
    T1 s=0 c=5: x=- y:=1
    T2 s=0 c=6: y=- x:=1
"""


@PLANTED
def test_planted_disagreements_are_found(text: str) -> None:
    history, _, name = text.strip().partition(" -> ")
    assert {found.name for found in replay(parse(history.replace("; ", "\n")))} == {name}


def test_clean_histories_pass() -> None:
    assert replay(parse(CLEAN), "serializable") == []


def test_serializable_transactions_read_what_is_there_at_commit() -> None:
    assert replay(parse(SKEW), "snapshot") == []
    (found,) = replay(parse(SKEW), "serializable")
    assert str(found) == "read-overwritten: T2 read () of y, (1,) when it committed"
