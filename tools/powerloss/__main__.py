"""Records a run of a store and examines it after power losses.

    python -m tools.powerloss FOLDER                    1,000 states of a default run
    python -m tools.powerloss FOLDER --all --seeds 3    every boundary, three seeds, both models

FOLDER is made. States after which something was wrong stay there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.powerloss import workload as work
from tools.powerloss.explore import explore, losses, record
from tools.powerloss.recording import Recording, build, unavailable


def main() -> int:
    """Runs the command line; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.powerloss")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every boundary of the log")
    parser.add_argument("--sample", type=int, default=1000, help="states, without --all")
    parser.add_argument("--seeds", type=int, default=2, help="states of each boundary and model")
    parser.add_argument("--seed", type=int, default=1, help="of the run")
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--transactions", type=int, default=12, help="of each writer")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    workload = work.Workload(
        options.seed,
        options.writers,
        options.pipelines,
        options.processes,
        options.transactions,
    )
    options.folder.mkdir(parents=True)
    recording = Recording(options.folder / "run", build(options.folder))
    log = record(recording, workload)
    chosen = losses(log, range(options.seeds), sample=None if options.all else options.sample)
    print(f"{len(log.operations)} operations, {len(log.boundaries())} boundaries")
    findings = explore(recording, workload, chosen, progress=_show)
    print(f"\n{len(chosen)} states, {len(findings)} with problems")
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty() or done % 500 == 0:
        print(f"\r{done} of {total}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
