"""A process that has imported all that tests need, and forks children that run programs.

Started by `tools.forked`, which asks for children through a socket, this process's stdin. It has
one thread and no store. A child finds what `python -c` would give it: its arguments, environment,
folder and streams, `__main__`, a seed of its own, faults armed as TXNKV_FAULT says; at its end its
threads are waited for and what is registered with atexit is called.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from txnkv.storage.faults import arm_from_environment

NUMBER: Final = 8
"""Bytes of a number in the socket: the length of a request, the process id of a child."""

_PRELOADED: Final = ("numpy", "pandas", "pyarrow.compute", "tools.crash_scenarios", "txnkv.aio")


def receive(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes.

    Raises:
        ConnectionResetError: there are none to come.
    """
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionResetError
    return data


def serve() -> NoReturn:
    """Fork a child for each request, until there is nobody who asks."""
    # What children would import, here and once, and no thread that they would miss.
    for module in _PRELOADED:
        with suppress(ImportError):  # not everything is installed everywhere
            importlib.import_module(module)
    dir(importlib.import_module("txnkv"))  # its names are loaded when they are asked for
    sys.modules["pyarrow"].array([])  # pyarrow finds out about pandas
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"what was imported started {len(tasks) - 1} threads"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    asked = socket.socket(fileno=os.dup(0))
    while True:
        # A request: the length of its text, with the standard streams of the child; the text.
        try:
            header, descriptors, _, _ = socket.recv_fds(asked, NUMBER, 3)
            if not header:
                os._exit(0)
            request = pickle.loads(receive(asked, int.from_bytes(header, "big")))
        except (KeyboardInterrupt, ConnectionResetError):
            os._exit(1)
        # The child's parent is one that ends, so that it becomes a child of who asked.
        between = os.fork()
        if between == 0:
            _fork_again(asked, descriptors, request)
        os.waitpid(between, 0)
        asked.sendall(b".")
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_again(asked: socket.socket, descriptors: list[int], request: tuple[Any, ...]) -> NoReturn:
    between = os.getpid()
    pid = os.fork()
    if pid != 0:
        asked.sendall(pid.to_bytes(NUMBER, "big"))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    asked.detach()  # closed with all others
    program, *rest = request
    become(descriptors, *rest)
    run(program)


def become(descriptors: list[int], argv: list[str], environment: dict[str, str], cwd: str) -> None:
    """Make this process what a new one would be."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv[:] = argv
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = open(  # noqa: SIM115
            number, "w" if number else "r", encoding=old.encoding, errors=old.errors, closefd=False
        )
        new.reconfigure(line_buffering=number == 2)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # that of `random` is new in every fork


def run(program: str) -> NoReturn:
    """Run it as `python -c` does, to the end of the process.

    What the program has is dropped, and modules are left: to take all of them apart, as Python
    does, takes ten times as long as the fork.
    """
    main, code = vars(sys.modules["__main__"]), 0
    try:
        arm_from_environment()
        exec(compile(program, "<string>", "exec"), main)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # What the interpreter does at its end, in its order.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main.clear()
    gc.collect()
    sys.stdout.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)
