"""The checker of histories: each anomaly that is planted is found, and nothing else is."""

from __future__ import annotations

import pytest

from tests.scripts import scripts
from tools.isolation.checker import check
from tools.isolation.histories import parse

# Each: the history, and the names of all that is to be found in it, in real-time order. An
# intermediate read reads a part, and misses one; nothing tells which of two registers came first.
PLANTED = scripts("""
== a write cycle
T1: x+1 y+1; T2: x+2 y+2; T3: x[1 2] y[2 1] -> G0
== a write cycle over one key
T1: x+1 x+2; T2: x+3; T3: x[1 3 2] -> G0
== writes against real time
T1 10-20: x+1; T2 30-40: x+2; T3 10-99: x[2 1] -> G0-realtime
== writes against the order of their session
T1 @p 10-20: x+1; T2 @p 30-40: x+2; T3 @q 10-99: x[2 1] -> G0-session
== an aborted read of a list
T1 fail: x+1; T2: x[1] -> G1a
== an aborted read of a register
T1 fail: x:=1; T2: x=1 -> G1a
== an intermediate read of a list
T1: x+1 x+2; T2: x[1]; T3: x[1 2] -> G-single G1b
== an intermediate read of a register
T1: x:=1 x:=2; T2: x=1 -> G-single G1b
== two that read each other's lists
T1: x+1 y[1]; T2: y+1 x[1] -> G1c
== two that read each other's registers
T1: x:=1 y=1; T2: y:=1 x=1 -> G1c
== a read of what was overwritten before it
T1: x+1 y+1; T2: x+2 y[1]; T3: x[2 1] -> G1c
== a read of the future
T1 10-20: x[1]; T2 30-40: x+1 -> G1c-realtime
== a part of a transaction is missed
T1: x+1 y+1; T2: x[1] y[] -> G-single
== a part of a transaction is missed, in registers
T0: x:=1 y:=1; T1: x=1 y=1 x:=2 y:=2; T2: x=2 y=1 -> G-single
== a stale read of a list
T1 10-20: x+1; T2 30-40: x[] -> G-single-realtime
== a session that does not see its own write
T1 @p 10-20: x+1; T2 @p 30-40: x[] -> G-single-session
== a stale read of a register
T1 10-20: x:=1; T2 30-40: x:=2; T3 50-60: x=1 -> G-single-realtime cyclic-versions
== a long fork
T1: x+1; T2: y+1; T3: x[1] y[]; T4: x[] y[1] -> G-nonadjacent
== a lost update of a list
T1: x[] x+1; T2: x[] x+2; T3: x[1 2] -> G-single lost-update
== a lost update of a register
T1: x=- x:=1; T2: x=- x:=2; T3: x=2 -> G2-item lost-update
== a lost update, and the lost one was never seen
T1: x[] x+1; T2: x[] x+2; T3: x[2] -> G-single lost-update
== an append that is not there later
T1 10-20: x+1; T2 30-40: x+2; T3 50-60: x[2] -> G-single-realtime G0-realtime
== a write upon an aborted one
T1 fail: x+1; T2: x+2; T3: x[1 2] -> G1a dirty-update
== a write upon an aborted one, in a register
T1 fail: x:=1; T2: x=1 x:=2 -> G1a dirty-update
== orders that do not go together
T1: x+1; T2: x+2; T3: x[1 2]; T4: x[2 1] -> incompatible-order
== the order of appends in a transaction
T1: x+1 x+2; T2: x[2 1] -> G1b incompatible-order
== versions that go back
T1: x:=1; T2: x:=2; T3 10-20: x=1; T4 30-40: x=2; T5 50-60: x=1 -> cyclic-versions
== an element twice
T1: x+1; T2: x[1 1] -> duplicate-elements
== what nobody wrote
T1: x+1; T2: x[1 9]; T3: y=7 -> garbage-read
== its own write is not read
T1: x:=1 x=- -> internal
== its own append is not read
T1: x[] x+1 x[]; T2: y+1 y[] -> internal
== a read that is not repeatable
T1: x+1; T2: x[] x[1]; T3: y=- y:=1 -> internal
== a read before the write of its own
T1: x[1] x+1 -> internal
== write skew
T1: x[] y+1; T2: y[] x+1 -> G2-item
== write skew in registers
T0: x:=1 y:=1; T1: x=1 y=1 y:=2; T2: x=1 y=1 x:=3 -> G2-item
== write skew of three
T1: x[] y+1; T2: y[] z+1; T3: z[] x+1 -> G2-item
== the read-only transaction anomaly
T1 10-90: x[] y[] x+1; T2 20-30: y+1; T3 40-50: x[] y[1] -> G2-item
== write skew against real time
T1 10-90: x[] y+1; T2 20-30: x+1; T3 40-50: y[] -> G2-item-realtime
== an unknown one counts when it was read
T1 10- info: x+1 y+1; T2 10-99: x[1] y[] -> G-single
== an unknown one counts when an unknown one that counts read it
T1 info: x+1 y+1; T2 info: x[1] y[] z+1; T3: z[1] -> G-single
""")

CLEAN = scripts("""
== nothing

== one after the other
T1 10-20: x[] x+1 y:=1; T2 30-40: x[1] x+2 y=1 y:=2; T3 50-60: x[1 2] y=2
== at once, in the other order than they are written
T1 10-99: x+1; T2 10-99: x+2; T3 10-99: x[2]; T4 10-99: x[2 1]
== own writes are read
T1: x+1 x+2 x[1 2] y:=3 y=3 y:=4 y=4; T2: x[1 2] x+3 x[1 2 3] y=4
== aborted ones are not seen
T1 10-20 fail: x+1 y:=1 x[9] z=9; T2 30-40: x[] y=-
== an unknown one that did not happen
T1 10- info: x+1; T2 30-40: x[]
== an unknown one that happened late
T1 10- info: x+1; T2 30-40: x[]; T3 50-60: x[1]
== an end and a begin of one moment say nothing
T1 10-20: x+1; T2 20-30: x[]
== a write without a read
T1 10-50: x:=1; T2 10-50: x:=2; T3 60-70: x=1
""")


@PLANTED
def test_planted_anomalies_are_found_under_their_names(text: str) -> None:
    history, _, wanted = text.partition("-> ")
    report, names = check(parse(history.replace("; ", "\n"))), set(wanted.split())
    assert report.names == names, str(report)
    assert not report.satisfies("serializable")
    assert report.satisfies("snapshot") == all(name.startswith("G2-item") for name in names)


@CLEAN
def test_clean_histories_pass(text: str) -> None:
    report = check(parse(text.replace("; ", "\n")))
    assert report.names == set(), str(report)
    assert report.satisfies("snapshot")
    assert report.satisfies("serializable")
    assert str(report) == "no anomaly"


@pytest.mark.parametrize(
    ("order", "names"),
    [("none", set()), ("session", {"G-single-session"}), ("realtime", {"G-single-session"})],
)
def test_order_is_an_option(order: str, names: set[str]) -> None:
    history = parse("T1 @p 10-20: x+1\nT2 @p 30-40: x[]\nT3 @q 30-40: x[1]")
    assert check(history, order).names == names


def test_message_shows_the_cycle() -> None:
    report = check(parse("T1: x+1 y+1\nT2: x[1] y[]"))
    (found,) = report.anomalies
    assert str(found) == "G-single: T2 -rw(y: - before 1)-> T1 -wr(x: 1)-> T2"
    assert found.txns == ("T2", "T1")
    assert report.violations("snapshot") == [found]


def test_each_part_of_the_graph_is_reported() -> None:
    report = check(parse("T1: x[] y+1\nT2: y[] x+1\nT3: a[] b+1\nT4: b[] a+1"))
    assert sorted(sorted(found.txns) for found in report.anomalies) == [["T1", "T2"], ["T3", "T4"]]
