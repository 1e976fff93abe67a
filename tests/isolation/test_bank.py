"""A bank of accounts under transfers of four processes, which are killed and replaced.

Beside them audits at one instant: the money is all there, each balance is what the transfers
make of it, and what a process was told is committed is in every later snapshot. Each process
writes the id of a transfer to a file of its own after its commit was answered: what is in the
file survives the process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tools.children import Child, Children
from tools.isolation.bank import open_bank, problems, transfer_ids

TELLER = """
from pathlib import Path
from random import Random
from tools.isolation.bank import transfer
path, folder, isolation, number = args[0], Path(args[1]), args[2], int(args[3])
told = os.open(folder / f"told{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
chance = Random(number)
id = number * 1_000_000
bank = os.getppid()
with txnkv.connect(path, create=False) as client:
    while not (folder / "closed").exists() and os.getppid() == bank:
        id += 1
        try:
            done = transfer(client, id, chance, isolation)
        except (txnkv.TransactionConflictError, txnkv.TransactionLockedError):
            continue
        if done:
            os.write(told, f"{id}\\n".encode())
"""


class Bank:
    """Four tellers at a time, each a process."""

    def __init__(self, children: Children, path: str, folder: Path, isolation: str) -> None:
        self._children = children
        self._folder = folder
        self._args = path, folder, isolation
        self._number = 0
        self._tellers = [self._hire() for _ in range(4)]

    def _hire(self) -> Child:
        self._number += 1
        return self._children.start(TELLER, *self._args, self._number)

    def kill_one(self, chance: random.Random) -> None:
        """SIGKILL, in whatever it does; another takes its place."""
        at = chance.randrange(len(self._tellers))
        self._tellers[at].kill()
        self._tellers[at] = self._hire()

    def told(self) -> set[int]:
        """The transfers that are known to be committed. A last line may be cut short."""
        lines = (path.read_text().split("\n")[:-1] for path in self._folder.glob("told*"))
        return {int(line) for each in lines for line in each}

    def look_after(self) -> None:
        """Fail when a teller did."""
        for teller in self._tellers:
            if teller.popen.poll() is not None:
                teller.finish()

    def end(self) -> None:
        (self._folder / "closed").touch()
        for teller in self._tellers:
            teller.finish()


def audit(client: txnkv.Client, told: set[int], snapshot: txnkv.Snapshot) -> None:
    """Check that a snapshot has the transfers told before it was taken, and the books are right."""
    assert list(problems(snapshot)) == []
    lost = told - transfer_ids(snapshot)
    assert not lost, f"committed, and not there: {sorted(lost)}"


def run(
    children: Children,
    client: txnkv.Client,
    folder: Path,
    isolation: str,
    seconds: float,
    longest: float = 0.5,
) -> None:
    """For so many seconds; a teller is killed after `longest` at the latest, then the next."""
    chance = random.Random(7)
    open_bank(client)
    earlier = [int(client.snapshot().timestamp)]
    bank = Bank(children, client.path, folder, isolation)
    begun = time.monotonic()
    next_kill = begun + 0.4
    audits = kills = 0
    while time.monotonic() < begun + seconds or kills < 5 or len(bank.told()) < 50:
        assert time.monotonic() < begun + seconds + 60, "the tellers do next to nothing"
        bank.look_after()
        told = bank.told()
        with client.snapshot() as snapshot:
            audit(client, told, snapshot)
            earlier.append(int(snapshot.timestamp))
        with client.snapshot(at=txnkv.Timestamp(chance.choice(earlier))) as then:
            assert list(problems(then)) == []
        audits += 1
        if audits % 20 == 0:
            client.compact()
        if time.monotonic() > next_kill:
            bank.kill_one(chance)
            kills += 1
            next_kill = time.monotonic() + chance.uniform(0.05, longest)
    bank.end()
    told = bank.told()
    with client.snapshot() as snapshot:
        audit(client, told, snapshot)
    client.close()
    with txnkv.connect(client.path, create=False) as again, again.snapshot() as snapshot:
        audit(again, told, snapshot)


@pytest.fixture
def children() -> object:
    with Children() as started:
        yield started


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_money_stays(
    children: Children, connect: Callable[..., txnkv.Client], tmp_path: Path, isolation: str
) -> None:
    run(children, connect(), tmp_path, isolation, 1.5, longest=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_money_stays_for_minutes(
    children: Children, connect: Callable[..., txnkv.Client], tmp_path: Path, isolation: str
) -> None:
    run(children, connect(), tmp_path, isolation, 120, longest=2.0)
