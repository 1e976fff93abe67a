"""Makes the tools importable, and takes the fixtures from there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tools.store_fixtures import children, connect, store, template

__all__ = ["children", "connect", "store", "template"]
