"""The leader's lease: one holder, a term that rises, a stale leader that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests import internals
from txnkv.coordinator.liveness import LEASE_TIME, Lease, LeaseLostError

CODE = """
lease = client.instance.coordinator.maintenance.lease
say((lease.acquire(), lease.term))
while wait() == "again":
    say((lease.acquire(), lease.term))
"""


def test_one_process_leads(client: Any, process: Any, by_hand: Any) -> None:
    by_hand(client)
    lease = internals.maintenance(client).lease
    term = lease.term
    other = process(CODE)
    assert other.hear() == (False, None)
    lease.release()
    other.tell("again")
    assert other.hear() == (True, term + 1)
    assert not lease.acquire()
    other.kill()
    assert lease.acquire()
    assert lease.term == term + 2


def test_a_silent_leader_loses_it(client: Any, process: Any, by_hand: Any, now: Any) -> None:
    """Another takes over though its process lives; the old one's next write is refused."""
    other = process(CODE)
    leads, term = other.hear()
    assert leads
    mine = internals.maintenance(client).lease
    assert not mine.acquire()
    now.forward(LEASE_TIME / 1e6 + 1)
    assert mine.acquire()
    assert mine.term == term + 1
    other.tell("again")
    assert other.hear() == (False, None)


def test_confirm_refuses_a_stale_leader(world: Any, now: Any) -> None:
    stale, fresh = Lease(world.store), Lease(world.store)
    assert stale.acquire()
    with world.store.status.write() as cur:
        assert stale.confirm(cur) == stale.term == 1
    now.forward(LEASE_TIME / 1e6 + 1)
    assert fresh.acquire()
    with world.store.status.write() as cur:
        with pytest.raises(LeaseLostError):
            stale.confirm(cur)
        assert fresh.confirm(cur) == 2
    assert stale.term is None


def test_a_lease_is_renewed_without_a_new_term(world: Any, now: Any) -> None:
    lease = Lease(world.store)
    for _ in range(10):
        assert lease.acquire()
        now.forward(LEASE_TIME / 3e6)
    assert lease.term == 1


def test_a_second_lease_that_nobody_renewed_is_not_taken_twice(world: Any) -> None:
    first, second = Lease(world.store), Lease(world.store)
    assert first.acquire()
    assert not second.acquire()
    first.release()
    first.release()
    assert second.acquire()
    assert second.term == 2


def test_of_two_who_find_the_leader_silent_one_takes_its_lease(
    world: Any, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, first, second = (Lease(world.store) for _ in range(3))
    assert old.acquire()
    now.forward(LEASE_TIME / 1e6 + 1)
    free = first._free

    def overtaken(*held: Any) -> bool:
        assert second.acquire()
        return free(*held)

    monkeypatch.setattr(first, "_free", overtaken)
    assert not first.acquire()
    assert (first.term, second.term) == (None, 2)
