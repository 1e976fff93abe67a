"""The driver's side of the process that looks on."""

from __future__ import annotations

import json
import subprocess
import sys

from examples.demo.look import Look


class Watcher:
    """The process, from the driver's side."""

    def __init__(self, store: str, tables: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo.looker", store, *tables],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._ready = self._process.stdout.readline()

    def finish(self) -> list[Look]:
        """End it; what it saw."""
        out, _ = self._process.communicate(timeout=60)
        if self._process.returncode or not self._ready:
            raise RuntimeError(f"the process that looks on ended with {self._process.returncode}")
        found = [json.loads(line) for line in out.splitlines()]
        return [Look(**{**look, "counts": tuple(look["counts"])}) for look in found]

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
