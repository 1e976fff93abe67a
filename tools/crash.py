"""The crash driver: kills a process at fault points and looks whether the store is whole.

    python -m tools.crash FOLDER                        every fault point, a line for each
    python -m tools.crash FOLDER --point commit.decided

A child does a scenario of `crash_scenarios` and dies of SIGKILL at an armed fault point. The
driver then opens the store as anybody would and examines it: the transaction is wholly there
or wholly not, it is there if the child was told so, nothing staged and no lock is left, and
all blocks and the status database are sound.

Children are forked (`tools.forked`), so that a kill costs milliseconds, not the start of an
interpreter.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import txnkv
from tools import (
    crash_alter,
    crash_applications,
    crash_jobs,
    crash_key_compaction,
    crash_logs,
    crash_plain,
    crash_producers,
    crash_side,
    crash_subscriptions,
    crash_topics,
)
from tools.crash_scenarios import (
    ACKNOWLEDGED,
    BEFORE,
    ROWS,
    TABLES,
    prepare,
    replaced,
    rows,
)
from tools.forked import Popen
from txnkv.storage import FAULT_POINTS, clock
from txnkv.storage.faults import FAULT_VARIABLE
from txnkv.tables.maintenance import compaction

THERE: Final = "there"
GONE: Final = "gone"
EITHER: Final = "either"


@dataclass(frozen=True)
class Plan:
    """The way a fault point is passed, and what is true after a death there.

    Attributes:
        scenarios: those that pass it.
        outcome: of the transaction, when it dies at the first pass and after all others.
        every: die at the first pass, then so many passes later, and so on; 0 at the first alone.
            After one commit the files are as before the next, so few of those passes will do.
    """

    scenarios: tuple[str, ...]
    outcome: str = EITHER
    every: int = 0


def _examine_topics(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    there = client.table(TABLES[0]).get(BEFORE) is not None
    return crash_topics.examine(client, said, there)


def _examine_jobs(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    return crash_jobs.examine(client.table(TABLES[0]).get(BEFORE) is not None, client)


def _examine_aborted_jobs(client: txnkv.Client, said: Sequence[str]) -> list[str]:
    return crash_jobs.examine(False, client)


PLANS: Final[dict[str, Plan]] = {
    "directory.before_format": Plan(("create",)),
    "lmdb.before_commit": Plan(
        ("commit", "rollback", "log", "topics_commit", "topics_rollback", "topics_alone"), every=1
    ),
    "lmdb.after_commit": Plan(
        ("commit", "rollback", "log", "topics_commit", "topics_small"), every=4
    ),
    "status.before_commit": Plan(
        (
            "create",
            "commit",
            "commit_small",
            "rollback",
            "topics_commit",
            "topics_rollback",
            "topics_small",
            "topics_alone",
            "topics_widen",
        ),
        every=1,
    ),
    "status.after_commit": Plan(
        (
            "create",
            "commit",
            "commit_small",
            "rollback",
            "topics_commit",
            "topics_alone",
            "topics_widen",
            "apply",
            "alter",
        ),
        every=2,
    ),
    "status.unsynced": Plan(
        (
            "create",
            "commit",
            "commit_small",
            "rollback",
            "topics_commit",
            "topics_small",
            "topics_alone",
        ),
        every=2,
    ),
    "append.reserved": Plan(("topics_commit", "job", "plain"), GONE, every=1),
    "append.written": Plan(("topics_commit", "job", "plain"), GONE, every=2),
    "append.side": Plan(("topics_commit", "side", "job"), GONE, every=2),
    "staged.registered": Plan(("job", "job_rollback"), GONE, every=1),
    "staged.written": Plan(("job", "job_rollback"), GONE, every=3),
    "staged.counted": Plan(("job", "job_rollback"), GONE, every=5),
    "staged.removed": Plan(("job", "job_rollback", "job_abort"), GONE),
    "job.ending": Plan(("job",), GONE),
    "job.appended": Plan(("job",), GONE),
    "job.ended": Plan(("job",), GONE),
    "offsets.regained": Plan(("regain",)),
    # A part is damaged until it is accepted again: killed in tests/crash/test_extents.py.
    "mending.written": Plan(()),
    "mending.named": Plan(()),
    # Of files that have grown and are mostly free: tests/storage/test_holes.py.
    "holes.made": Plan(()),
    "holes.awaited": Plan(()),
    # Of one that is mostly free: tests/client/test_compact.py.
    "status.shortened": Plan(()),
    # Nothing but a mark comes to the store in a backup: killed in tests/crash/test_backup.py.
    "backup.status": Plan(()),
    "backup.marked": Plan(()),
    "backup.file": Plan(()),
    "backup.logs": Plan(()),
    "backup.listed": Plan(()),
    "backup.renamed": Plan(()),
    "restore.part": Plan(()),
    "restore.filled": Plan(()),
    "restore.opened": Plan(()),
    "restore.renamed": Plan(()),
    # Nor in a dump: tests/client/test_dumps.py.
    "dump.copied": Plan(()),
    "dump.renamed": Plan(()),
    "log.completed": Plan(("topics_commit", "topics_small"), every=1),
    "marker.written": Plan(("topics_commit",), THERE),
    "marker.decided": Plan(("topics_alone",), every=1),
    "marker.aborting": Plan(("topics_rollback",), GONE, every=1),
    "marker.aborted": Plan(("topics_rollback",), GONE, every=1),
    "log.written": Plan(("commit_small", "topics_small", "apply"), GONE),
    "log.durable": Plan(("commit_small",), THERE),
    "stage.claimed": Plan(("commit", "commit_locked"), GONE),
    "stage.blocks": Plan(("commit",), GONE),
    "stage.written": Plan(("commit",), GONE),
    "stage.staged": Plan(("commit", "commit_locked"), GONE),
    "stage.accepted": Plan(("commit",), GONE),
    "commit.started": Plan(("commit", "replace", "topics_commit")),
    "commit.validated": Plan(("commit", "replace", "topics_commit")),
    "commit.in_point": Plan(("commit", "commit_locked", "replace", "topics_commit", "apply")),
    "commit.decided": Plan(("commit", "commit_locked", "replace", "topics_commit"), THERE),
    "resolve.put": Plan(("replace",), THERE, every=5),
    "resolve.resolved": Plan(("replace",), THERE),
    "commit.finalized": Plan(("commit", "commit_locked", "replace", "topics_commit"), THERE),
    "commit.ended": Plan(("commit", "topics_commit"), THERE),
    "flush.claimed": Plan(("maintain",), THERE, every=1),
    "flush.blocks": Plan(("maintain",), THERE, every=9),
    "flush.written": Plan(("maintain",), THERE, every=1),
    "flush.deleted": Plan(("maintain",), THERE, every=3),
    "flush.published": Plan(("maintain",), THERE, every=1),
    "compact.claimed": Plan(("maintain",), THERE, every=5),
    "compact.blocks": Plan(("maintain",), THERE, every=9),
    "compact.written": Plan(("maintain",), THERE, every=3),
    "compact.caught_up": Plan(("maintain",), THERE, every=3),
    "compact.swapped": Plan(("maintain",), THERE, every=3),
    "history.raised": Plan(("maintain",), THERE, every=1),
    "history.removed": Plan(("maintain",), THERE, every=5),
    "history.forgotten": Plan(("maintain",), THERE),
    "log.trimmed": Plan(("maintain",), THERE),
    "shrink.copied": Plan(("maintain",), THERE, every=3),
    "shrink.renamed": Plan(("maintain",), THERE, every=3),
    "abort.started": Plan(("rollback", "topics_rollback"), GONE),
    "abort.swept": Plan(("rollback", "topics_rollback"), GONE),
    "abort.ended": Plan(("rollback", "topics_rollback"), GONE),
    "side.own_written": Plan(("side",), every=2),
    "side.own_renamed": Plan(("side",), every=1),
    "side.dropped": Plan(("side",), every=1),
    "side.retired": Plan(("side",), every=1),
    "side.removed": Plan(("side",), every=3),
    "side.moving": Plan(("side",), every=3),
    "side.compacted": Plan(("side",), every=3),
    "partition.put": Plan(("log",), GONE, every=1),
    "partition.rolled": Plan(("log",), GONE, every=1),
    "partition.snapshot": Plan(("log",), GONE, every=1),
    "partition.truncated": Plan(("log",), GONE, every=1),
    "partition.trimmed": Plan(("log",), GONE, every=1),
    "producer.registered": Plan(("produce",), every=1),
    "producer.checked": Plan(("produce",), every=1),
    "producer.recorded": Plan(("produce",), every=1),
    "producer.swept": Plan(("produce",)),
    "retention.dropped": Plan(("retain",), every=3),
    "retention.rolled": Plan(("retain",)),
    "log.rewritten": Plan(("hide",), every=1),
    "compaction.put": Plan(("hide",), every=1),
    "compaction.marked": Plan(("hide",), every=1),
    "topic.truncated": Plan(("retain",)),
    "topic.altered": Plan(("topics_evolve",), every=1),
    "topic.alter_durable": Plan(("topics_evolve",), every=1),
    "truncate.cut": Plan(("cut",), every=1),
    "follow.put": Plan(("follow",), every=7),
    "follow.offset": Plan(("follow",), every=1),
    "follow.cut": Plan(("follow",), every=1),
    "acks.registered": Plan(("pass_on",), GONE, every=1),
    "acks.applied": Plan(("pass_on",), GONE, every=1),
    "acks.returned": Plan(("pass_on",), GONE, every=1),
    "leases.claimed": Plan(("pass_on",), GONE, every=3),
    "alter.written": Plan(("alter",), GONE, every=1),
    "alter.durable": Plan(("alter",), GONE, every=1),
    "index.added": Plan(("index",), GONE, every=1),
    "index.filled": Plan(("index",), GONE, every=5),
    "index.whole": Plan(("index",), GONE, every=1),
    "applications.staged": Plan(("apply",), GONE, every=1),
    "applications.written": Plan(("apply",), GONE, every=1),
}
"""A death in COMMIT_IN_PROGRESS may end either way: who recovers goes on with the commit."""

EXAMINERS: Final[dict[str, Callable[[txnkv.Client, Sequence[str]], list[str]]]] = {
    "topics_commit": _examine_topics,
    "topics_rollback": _examine_topics,
    "topics_small": _examine_topics,
    "topics_alone": crash_topics.examine_alone,
    "topics_widen": crash_topics.examine_widen,
    "topics_evolve": crash_topics.examine_evolve,
    "job": _examine_jobs,
    "job_rollback": _examine_jobs,
    "job_abort": _examine_aborted_jobs,
    **crash_alter.EXAMINERS,
    **crash_applications.EXAMINERS,
    "hide": crash_key_compaction.examine_hide,
    **crash_plain.EXAMINERS,
    **crash_producers.EXAMINERS,
    **crash_subscriptions.EXAMINERS,
}
"""By scenario: what else is wrong, as a client of the store sees it, after what the child said."""

PATH_EXAMINERS: Final[dict[str, Callable[[Path, Sequence[str]], list[str]]]] = {
    "log": crash_logs.examine,
    "side": crash_side.examine,
}
"""By scenario: what else is wrong with a store that nobody has open, and what its child said."""


# -- children --------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """The way a child ended.

    Attributes:
        code: of the process; minus the signal that killed it.
        said: the lines it printed.
    """

    code: int
    said: tuple[str, ...]

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def acknowledged(self) -> bool:
        return ACKNOWLEDGED in self.said


def run_child(scenario: str, path: Path, fault: str = "", *args: str) -> Death:
    """Have a child go through a scenario, with a fault as in TXNKV_FAULT."""
    child = Popen(
        [sys.executable, "-c", _CHILD, scenario, str(path), *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, FAULT_VARIABLE: fault},
        cwd=Path(__file__).parent.parent,
    )
    said, _ = child.communicate()
    return Death(child.returncode, tuple(said.splitlines()))


_CHILD: Final = """
import sys
from tools.crash_scenarios import SCENARIOS
SCENARIOS[sys.argv[1]](*sys.argv[2:])
"""


# -- afterwards ------------------------------------------------------------------------


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """This process takes the monotonic time to be so much later: what has run out is ended."""
    with clock.replaced(monotonic=lambda: _monotonic() + int(seconds * 1e6)):
        yield


def _monotonic() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def run_out(client: txnkv.Client) -> None:
    """End the open transactions whose time is over an hour from now: all of them."""
    maintenance = client.instance.coordinator.maintenance
    # Who begins to lead gives what nobody listened to a fresh heartbeat.
    maintenance.round(resume_all=True)
    with later(3600):
        maintenance.round(resume_all=True)


def settle(client: txnkv.Client) -> None:
    """End what nobody keeps alive, now."""
    run_out(client)
    with client.instance.store.compaction():  # the leader does it in a thread
        compaction.sweep(client.instance.engine)


def leftovers(client: txnkv.Client) -> list[str]:
    """List what transactions that are over should not have left: one line each."""
    questions = {
        "row set {} is not committed": "SELECT id FROM row_sets WHERE state < 2 AND txn_id > 0",
        "a lock on tablet {} is held": "SELECT id FROM locks",
        "transaction {} has not ended": "SELECT txn_id FROM transactions WHERE state NOT IN (2, 4)",
    }
    found = []
    with client.instance.store.status.read() as cur:
        for text, question in questions.items():
            found += [text.format(id) for (id,) in cur.execute(question)]
    return found


def middle_states(client: txnkv.Client) -> list[str]:
    """Transactions that are neither OPEN nor ended."""
    ended = (txnkv.TxnState.OPEN, txnkv.TxnState.COMMITTED, txnkv.TxnState.ABORTED)
    return [f"{txn.id} {txn.state.name}" for txn in client.transactions() if txn.state not in ended]


def examine(client: txnkv.Client, death: Death, outcome: str) -> list[str]:
    """Everything that is wrong after a death in "commit" or "rollback"; nothing if all is well."""
    problems = [f"recovery left {text} in a middle state" for text in middle_states(client)]
    settle(client)
    problems += leftovers(client)
    with client.snapshot() as snapshot:
        counts = [client.table(name).count(snapshot=snapshot) for name in TABLES]
    if counts not in ([BEFORE] * len(TABLES), [BEFORE + ROWS] * len(TABLES)):
        problems.append(f"a part is there: {counts} rows")
    problems += _contents(client)
    if outcome == THERE and counts[0] == BEFORE:
        problems.append("it is not there, after the commit point or an acknowledgement")
    if outcome == GONE and counts[0] != BEFORE:
        problems.append("it is there, though it was not committed")
    problems += client.check().problems
    if not problems:
        problems += _works(client)
    return [f"{problem} (the child said {death.said})" for problem in problems]


def _contents(client: txnkv.Client) -> list[str]:
    """Tables whose rows are those of no scenario, neither before nor after it."""
    known = [rows(0, BEFORE), rows(0, BEFORE + ROWS), replaced()]
    found = [client.table(name).scan(ordered=True).to_arrow() for name in TABLES]
    return [
        f"table {name} has other rows: {table.to_pylist()}"
        for name, table in zip(TABLES, found, strict=True)
        if not any(table.to_pydict() == rows.to_pydict() for rows in known)
    ]


def _works(client: txnkv.Client) -> list[str]:
    """A transaction after the crash; its rows are taken away by a rollback and then stay."""
    before = client.table(TABLES[0]).count()
    for end in ("rollback", "commit"):
        txn = client.new_transaction()
        for name in TABLES:
            txn.write(name, rows(1_000_000, 8))
        getattr(txn, end)()
    counts = [client.table(name).count() - before for name in TABLES]
    return [] if counts == [8, 8] else [f"of 8 new rows there are {counts}"]


def expected(scenario: str, plan: Plan, death: Death) -> str:
    """Return what has to become of the transaction of this child."""
    if scenario.endswith("rollback"):
        return GONE
    return THERE if death.acknowledged else plan.outcome


def kill_at(
    template: Path, folder: Path, point: str, scenario: str, stride: int = 1
) -> Iterator[tuple[str, list[str]]]:
    """Die at a point, once or at each pass in turn.

    Args:
        template: a store that `prepare` made; copied for each death.
        folder: where the copies go; each is removed again when it is sound.
        stride: of the passes that the plan names, every so many.

    Yields:
        The fault as in TXNKV_FAULT, and what is wrong afterwards.
    """
    plan = PLANS[point]
    for number in count(1, (plan.every or 1) * stride):
        fault = f"{point}=kill@{number}"
        path = folder / f"{scenario}-{point}-{number}"
        if scenario != "create":
            shutil.copytree(template, path)
        death = run_child(scenario, path, fault)
        if not death.killed:
            if number == 1 or death.code != 0:
                yield fault, [f"it was not killed, it ended with {death.code}"]
            return
        yield fault, _open_twice(path, scenario, plan, death)
        shutil.rmtree(path)
        if not plan.every:
            return


def _open_twice(path: Path, scenario: str, plan: Plan, death: Death) -> list[str]:
    if scenario == "create":
        prepare(str(path))
        with txnkv.connect(path, create=False) as client:
            return examine(client, death, GONE)
    with txnkv.connect(path, create=False) as client:
        problems = examine(client, death, expected(scenario, plan, death))
        if scenario in EXAMINERS:
            problems += EXAMINERS[scenario](client, death.said)
        counts = [client.table(name).count() for name in TABLES]
    with txnkv.connect(path, create=False) as client:
        again = [client.table(name).count() for name in TABLES]
        problems += client.check().problems
    if scenario in PATH_EXAMINERS:
        problems += PATH_EXAMINERS[scenario](path, death.said)
    if again != counts:
        problems.append(f"opened again there are {again} rows, before there were {counts}")
    return problems


# -- as a program ----------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.crash", description=__doc__)
    parser.add_argument("folder", type=Path, help="where stores are made and removed")
    parser.add_argument("--point", choices=sorted(FAULT_POINTS), help="only this fault point")
    asked = parser.parse_args()
    logging.getLogger("txnkv").setLevel(logging.ERROR)  # that transactions expire is no news
    asked.folder.mkdir(parents=True, exist_ok=True)
    template = asked.folder / "template"
    prepare(str(template))
    failed = 0
    for point in [asked.point] if asked.point else PLANS:
        for scenario in PLANS[point].scenarios:
            for fault, problems in kill_at(template, asked.folder, point, scenario):
                failed += bool(problems)
                print(f"{scenario:14} {fault:32} {'; '.join(problems) or 'whole'}", flush=True)
    shutil.rmtree(template)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
