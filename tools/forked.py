"""Python programs that start as fast as a fork: `Popen`, as of subprocess.

    child = Popen([sys.executable, "-c", program, *args], stdout=subprocess.PIPE, text=True)

Starting Python and importing txnkv, pyarrow and pandas takes more than a second, and most children
of a test run for less. So the first one starts `tools.zygote`, which has imported all of it and
forks when it is asked to. The child is one of this process, as any other: it is forked twice, and
this process is for that moment the reaper of orphans.

A child that does not run `-c`, and any outside Linux, is started as by `subprocess.Popen`. Use
that one for a program that is about how Python starts or ends: the options, PYTHONPATH and the
like are those of the zygote, and modules are not taken apart at the end.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from tools.zygote import NUMBER, receive
from txnkv.storage.faults import FAULT_VARIABLE

ROOT: Final = Path(__file__).parent.parent
NO_THREADS: Final = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_PR_SET_CHILD_SUBREAPER: Final = 36


class Popen(subprocess.Popen[str]):
    """A child of this process; forked from the zygote if it runs `[sys.executable, "-c", ...]`."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        if sys.platform != "linux" or args[:2] != [sys.executable, "-c"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        ends = [end if end != -1 else own for own, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        environment = dict(os.environ if env is None else env)
        program, argv = args[2], ["-c", *args[3:]]
        folder = os.path.abspath(cwd or ".")
        self.pid = _zygote().fork(ends, (program, argv, environment, folder))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Zygote:
    """The process that forks, as seen by the one that started it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, inside = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **NO_THREADS, "PYTHONPATH": path}
        environment.pop(FAULT_VARIABLE, None)
        with inside:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", "import tools.zygote; tools.zygote.serve()"],
                stdin=inside.fileno(),
                env=environment,
                cwd=ROOT,
            )
        atexit.register(self._close)

    def fork(self, descriptors: list[int], request: tuple[object, ...]) -> int:
        """Have a child forked with these as its standard streams; its process id.

        Raises:
            RuntimeError: the zygote is gone.
        """
        data = pickle.dumps(request)
        with self._lock:
            _reap_orphans(True)
            try:
                socket.send_fds(self._socket, [len(data).to_bytes(NUMBER, "big")], descriptors)
                self._socket.sendall(data)
                pid = int.from_bytes(receive(self._socket, NUMBER), "big")
                receive(self._socket, 1)  # the one between is gone, the child is ours
            except OSError as error:
                raise RuntimeError(
                    f"the process that forks children ended ({self._popen.poll()}); "
                    "its error is on stderr, or start them with subprocess.Popen"
                ) from error
            finally:
                _reap_orphans(False)
        return pid

    def _close(self) -> None:
        if os.getpid() == self.owner:
            self._socket.close()
            self._popen.wait()


_started: _Zygote | None = None
_starting: Final = threading.Lock()


def _zygote() -> _Zygote:
    """Return the zygote of this process; that of its parent would fork children of the parent."""
    global _started
    with _starting:
        if _started is None or _started.owner != os.getpid():
            _started = _Zygote()
        return _started


def _reap_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
