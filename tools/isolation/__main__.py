"""Checks a file that holds a history: see `tools.isolation.histories` for its form.

python -m tools.isolation FILE [snapshot | serializable]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.isolation.checker import ALLOWED, check
from tools.isolation.histories import parse


def main(args: Sequence[str]) -> int:
    """Check a file; the exit status tells whether it satisfies the isolation asked for."""
    wrong = not 1 <= len(args) <= 2 or (len(args) == 2 and args[1] not in ALLOWED)
    if wrong or args[0].startswith("-"):
        print("usage: python -m tools.isolation FILE [snapshot | serializable]", file=sys.stderr)
        return 2
    isolation = args[1] if len(args) == 2 else "serializable"
    history = parse(Path(args[0]).read_text())
    report = check(history)
    print(report)
    kept = report.satisfies(isolation)
    print(f"{len(history)} transactions: {isolation} {'holds' if kept else 'does not hold'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
