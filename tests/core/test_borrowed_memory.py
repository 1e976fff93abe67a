"""Memory that the core borrows: what holds it may be dropped in a circle, at any moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from txnkv import core
gc.disable()
keys = core.Keys.of([b"a", b"b"])
block = keys.to_block(0)

class Circle:
    pass

for _ in range(3):
    view = memoryview(block)
    circle = Circle()
    circle.itself = circle
    circle.borrows = {borrows}
    circle.view = view
    del view, circle
    gc.collect()
print("done")
"""


@pytest.mark.parametrize(
    "borrows",
    [
        "core.LayerBlock(view, None, None, [view], None, 0)",
        "core.Keys.fixed(view, 1)",
        "core.Keys.variable(view, bytes(4))",
        "core.Keys.from_block(view)",
    ],
)
def test_a_view_that_is_collected_takes_nobody_along(borrows: str) -> None:
    program = PROGRAM.format(borrows=borrows)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
