"""The C core where txnkv is imported from a zip file, as Spark's `--py-files` does it.

The system loads native code from a file of its own only. So the core is unpacked, loaded, and
the file removed: what is loaded stays.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Final
from zipimport import zipimporter

_NAME: Final = "txnkv._core"


def load() -> None:
    """Make `txnkv._core` importable.

    Raises:
        ImportError: txnkv is in no zip file, or in one without a core for this Python on this
            platform.
    """
    suffix, code = _find(sys.modules["txnkv"].__loader__)
    with tempfile.TemporaryDirectory(prefix="txnkv-core-") as folder:
        path = os.path.join(folder, "_core" + suffix)
        with open(path, "wb") as file:
            file.write(code)
        loader = ExtensionFileLoader(_NAME, path)
        spec = spec_from_file_location(_NAME, path, loader=loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    sys.modules[_NAME] = module


def _find(loader: object) -> tuple[str, bytes]:
    if not isinstance(loader, zipimporter):
        raise ImportError("the C core of txnkv is not built: pip install .", name=_NAME)
    for suffix in EXTENSION_SUFFIXES:
        try:
            return suffix, loader.get_data(os.path.join(loader.archive, "txnkv", "_core" + suffix))
        except OSError:
            continue
    raise ImportError(
        f"{loader.archive} has no C core for this Python on this platform: make the wheel here "
        "(pip wheel --no-deps txnkv), or install it",
        name=_NAME,
    )
