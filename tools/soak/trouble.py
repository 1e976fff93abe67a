"""Trouble for the processes of the soak: kills, stops, clocks that jump, a disk that is full."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import IO, Final

from tools.forked import Popen
from tools.soak.scene import Place

VETERANS: Final = frozenset({"feeder-sidecar-0", "biller-marker-0", "auditor-all-0"})
"""Are never killed, so that what a process keeps can be seen to stay flat."""
_JUMPS: Final = (-120.0, -10.0, 0.0, 0.0, 0.0, 10.0, 120.0)
_ROLE: Final = "import sys; from tools.soak import roles; roles.run(sys.argv[1:])"


@dataclass
class Actor:
    """One role, and the process that does it now."""

    name: str
    popen: subprocess.Popen[str]


class Company:
    """All roles: starts each anew when its process is gone.

    Attributes:
        happened: how often what befell them.
    """

    def __init__(self, place: Place, names: list[str], seed: int, disk_mib: int) -> None:
        self.happened: Counter[str] = Counter()
        self._place = place
        self._seed = seed
        self._starts = 0
        self._disk_mib = disk_mib
        self._output: IO[str] = (place.folder / "output").open("a")
        self.actors = [Actor(name, self._start(name)) for name in names]

    def _start(self, name: str) -> subprocess.Popen[str]:
        self._starts += 1
        self._place.beat(name).touch()
        seed = f"{self._seed}.{self._starts}"
        folder = str(self._place.folder)
        if name == "spark":
            command = [sys.executable, "-m", "tools.soak.spark", folder, seed]
            # A session of its own: Java and the workers go with it.
            return subprocess.Popen(
                command, stdout=self._output, stderr=self._output, text=True, start_new_session=True
            )
        command = [sys.executable, "-c", _ROLE, *name.split("-"), folder, seed]
        return Popen(command, stdout=self._output, stderr=self._output, text=True)

    def ended(self) -> list[str]:
        """Those that ended by themselves."""
        return [actor.name for actor in self.actors if actor.popen.poll() is not None]

    def late(self, seconds: float) -> list[str]:
        """Those that have taken no step for so long."""
        before = time.time() - seconds
        return [a.name for a in self.actors if self._place.beat(a.name).stat().st_mtime < before]

    def trouble(self, chance: random.Random) -> None:
        """Let something happen to one of them, or to all."""
        kind = chance.choices(
            ("kill", "stop", "clock", "disk"), (60, 25, 10, 5 * bool(self._disk_mib))
        )
        {"kill": self._kill, "stop": self._stop, "clock": self._jump, "disk": self._fill}[kind[0]](
            chance
        )

    def _kill(self, chance: random.Random) -> None:
        actor = chance.choice([each for each in self.actors if each.name not in VETERANS])
        if actor.name == "spark" and chance.random() < 0.8:
            return  # takes half a minute to begin: so it gets more time than the others
        self._end(actor)
        self.happened["kill"] += 1

    def _end(self, actor: Actor) -> None:
        self._signal(actor, signal.SIGKILL)
        actor.popen.wait()
        actor.popen = self._start(actor.name)

    def _stop(self, chance: random.Random) -> None:
        actor = chance.choice(self.actors)
        self._signal(actor, signal.SIGSTOP)
        time.sleep(chance.uniform(0.1, 12.0))
        self.happened["stop"] += 1
        if actor.name not in VETERANS and actor.name != "spark" and chance.random() < 0.3:
            self.happened["kill while stopped"] += 1
            self._end(actor)
        else:
            self._signal(actor, signal.SIGCONT)

    def _jump(self, chance: random.Random) -> None:
        actor = chance.choice(self.actors)
        self._place.clock(actor.name).write_text(str(chance.choice(_JUMPS)))
        self.happened["clock jump"] += 1

    def _fill(self, chance: random.Random) -> None:
        ballast = self._place.disk / "ballast"
        room = os.statvfs(self._place.disk)
        leave = chance.randrange(0, 2 << 20)
        try:
            with ballast.open("wb") as file:
                os.posix_fallocate(
                    file.fileno(), 0, max(4096, room.f_bavail * room.f_frsize - leave)
                )
            time.sleep(chance.uniform(0.5, 5.0))
        except OSError:
            pass  # others were first: it is as full as it gets
        finally:
            ballast.unlink(missing_ok=True)
        self.happened["full disk"] += 1

    def _signal(self, actor: Actor, number: signal.Signals) -> None:
        if actor.popen.poll() is None:
            if actor.name == "spark":
                os.killpg(actor.popen.pid, number)
            else:
                os.kill(actor.popen.pid, number)

    def dismiss(self, kinds: tuple[str, ...], seconds: float = 120.0) -> list[str]:
        """End these in peace; those that did not end by themselves, or ended with an error."""
        leaving = [actor for actor in self.actors if actor.name.split("-")[0] in kinds]
        self.actors = [actor for actor in self.actors if actor not in leaving]
        for actor in leaving:
            actor.popen.terminate()
        refused = []
        for actor in leaving:
            try:
                # One that was started a moment ago ends by the signal: it was not at work yet.
                if actor.popen.wait(seconds) not in (0, -signal.SIGTERM):
                    refused.append(f"{actor.name} ended with {actor.popen.returncode}")
            except subprocess.TimeoutExpired:
                refused.append(f"{actor.name} did not end in {seconds:.0f} s")
        return refused

    def close(self) -> None:
        """Kill those that are left."""
        for actor in self.actors:
            self._signal(actor, signal.SIGKILL)
            actor.popen.wait()
        self._output.close()
