"""pyarrow.compute, loaded when the first of its functions is called.

It makes a function for each of Arrow's kernels as it is imported, which takes longer than opening
a store does; small reads and writes need none of them.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The function or type of this name, found without this from its second use on."""
    import pyarrow.compute

    found = getattr(pyarrow.compute, name)
    globals()[name] = found
    return found
