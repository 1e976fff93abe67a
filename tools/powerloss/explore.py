"""Records a run, then opens the store in many states that a power loss may leave.

States are made and examined by a pool of processes: one that dies (LMDB maps its files, so damage
can be a SIGBUS) is a finding too.
"""

from __future__ import annotations

import logging
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, Final

from tools.powerloss.disk import MODELS, Disk, Model
from tools.powerloss.examine import Promised, examine, is_volatile
from tools.powerloss.log import Log, read
from tools.powerloss.recording import Recording
from tools.powerloss.states import States
from tools.powerloss.workload import Workload, to_text
from txnkv.coordinator.maintenance import Maintenance

STORE: Final = Path("data") / "store"
_AHEAD: Final = 4

_RUN: Final = """
from tools.powerloss.run import run
from tools.powerloss.workload import from_text
run(root / "data" / "store", from_text(args[0]))
"""


_RECOVERY: Final = """
from tools.powerloss.run import recover
from tools.powerloss.workload import from_text
recover(Path(args[0]), root, root / "data" / "store", from_text(args[1]))
"""


@dataclass(frozen=True, order=True)
class Loss:
    """One power loss: the record is cut after `cut` positions, `seed` draws what arrived."""

    cut: int
    seed: int
    model: Model


@dataclass(frozen=True)
class Finding:
    """A loss after which something was wrong; the state is kept in `folder`, as it was opened."""

    loss: Loss
    problems: tuple[str, ...]
    folder: Path

    def __str__(self) -> str:
        return f"{self.loss}: {'; '.join(self.problems)} ({self.folder})"


def record(recording: Recording, workload: Workload, plant: str = "") -> Log:
    """Does a workload in a recorded process.

    Args:
        recording: a new one.
        workload: what to do.
        plant: code that runs before, to plant a fault.
    """
    return recording.run(textwrap.dedent(plant) + _RUN, to_text(workload))


def record_recovery(recording: Recording, state: Path, workload: Workload) -> Log:
    """Opens a store that a loss left, in a recorded process: its log can be cut again.

    Args:
        recording: a new one.
        state: the folder of the state, as `States.write` makes it.
        workload: that the store is of.
    """
    return recording.run(_RECOVERY, state, to_text(workload))


def losses(
    log: Log, seeds: Iterable[int], models: Iterable[Model] = MODELS, sample: int | None = None
) -> list[Loss]:
    """Losses at the boundaries of a log, by ascending cut; a fixed sample of so many, or all."""
    seeds, models = list(seeds), list(models)
    every = [Loss(cut, s, model) for cut in log.boundaries() for s in seeds for model in models]
    if sample is None or sample >= len(every):
        return every
    return sorted(Random(sample).sample(every, sample))


def explore(
    recording: Recording,
    workload: Workload,
    chosen: list[Loss],
    *,
    promised: Promised | None = None,
    enough: int | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:
    """Examines the store after each of the losses.

    Args:
        recording: of a run of `workload`.
        workload: what was done.
        chosen: of `losses`.
        promised: what was acknowledged, after a `record_recovery`; else the marks tell it.
        enough: stop after so many findings.
        processes: that examine at the same time; default: one for each CPU.
        progress: is called with how many losses are done, and how many there are.
    """
    folder = recording.root.parent / "states"
    folder.mkdir(exist_ok=True)
    setting = (recording.log_path, recording.root, folder, workload, promised)
    findings = []
    # Processes are forked from one that has imported what they need, and done nothing else.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(processes or os.cpu_count(), context, _start, setting) as pool:
        for done, finding in enumerate(_outcomes(pool, iter(chosen)), 1):
            if finding is not None:
                findings.append(finding)
            if progress is not None:
                progress(done, len(chosen))
            if len(findings) == enough:
                break
    return sorted(findings, key=lambda finding: finding.loss)


def _outcomes(pool: ProcessPoolExecutor, chosen: Iterator[Loss]) -> Iterator[Finding | None]:
    running: dict[Future[Finding | None], Loss] = {}
    while True:
        for loss in islice(chosen, _AHEAD - len(running)):
            running[pool.submit(_examine, loss)] = loss
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            try:
                yield future.result()
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"a process died while it examined one of {sorted(running.values())}"
                ) from error
            del running[future]


# -- in the processes of the pool ------------------------------------------------------


class _Setting:
    """The setting that all losses of a run have in common."""

    def __init__(
        self,
        log_path: Path,
        root: Path,
        folder: Path,
        workload: Workload,
        promised: Promised | None,
    ) -> None:
        log = read(log_path)
        self.marks = log.marks()
        self.states = States(Disk(log, str(root)), is_volatile)
        self.folder = folder
        self.workload = workload
        self.promised = promised

    def examine(self, loss: Loss) -> Finding | None:
        """Examine one loss."""
        folder = self.folder / f"{loss.cut}-{loss.seed}-{loss.model}"
        self.states.write(folder, loss.cut, loss.seed, loss.model)
        promised = self.promised or Promised.by(self.marks, loss.cut)
        try:
            problems = examine(folder / STORE, self.workload, promised)
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        shutil.rmtree(folder)
        if not problems:
            return None
        self.states.write(folder, loss.cut, loss.seed, loss.model)
        return Finding(loss, tuple(problems), folder)


_setting: _Setting


def _start(*setting: Any) -> None:
    # Rounds are run by `examine`, and at no other moment: the same state, the same finding.
    Maintenance.start = lambda self: None  # type: ignore[method-assign]
    logging.getLogger("txnkv").setLevel(logging.ERROR)  # each store has the same dead to report
    global _setting
    _setting = _Setting(*setting)


def _examine(loss: Loss) -> Finding | None:
    return _setting.examine(loss)
