"""The start of a Python process that works for the tests' Spark: `worker_start.py SOCKET ARG...`.

Spark forks its workers from daemons, one for each kind of work and for each stream, and has a
process of its own for each source of a stream. Each of them imports pandas, pyarrow, pyspark and
txnkv, two seconds for what lasts less. So one process has imported all that (`serve`, started by
the fixture of Spark), and forks: what Spark starts asks it for a fork that gets its streams,
environment and folder, and waits for the end of that.

And Spark gives a process that it does not fork 10 s to connect, whatever the machine has to do:
here it connects first. Outside Linux each process does for itself what it is to do.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from functools import partial
from typing import Any, NoReturn

NUMBER = 8
"""Bytes of a number in the socket: the length of a request, the process id of a fork."""
AHEAD = (
    "pandas",
    "pyarrow.compute",
    "pyspark.daemon",
    "pyspark.sql.streaming.datasource",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.worker",
    "txnkv.spark.reading",
    "txnkv.spark.source",
    "txnkv.spark.streams.stream_readers",
    "txnkv.spark.streams.stream_writer",
    "txnkv.spark.writing",
)


# -- the process that forks --------------------------------------------------------------


def serve(listener: socket.socket) -> NoReturn:
    """Fork for each process that asks, for as long as the tests run."""
    from tools.zygote import become, receive, run

    for name in AHEAD:
        importlib.import_module(name)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"what was imported started {len(tasks) - 1} threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asked, _ = listener.accept()
        header, streams, _, _ = socket.recv_fds(asked, NUMBER, 3)
        if not header:  # somebody waits until the imports are done
            asked.close()
            continue
        jvm, *rest = pickle.loads(receive(asked, int.from_bytes(header, "big")))
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(streams, *rest)
            os.environ["TXNKV_TEST_JVM"] = str(jvm)
            run("work()")
        asked.sendall(pid.to_bytes(NUMBER, "big"))
        asked.close()
        for stream in streams:
            os.close(stream)


def ask(path: str) -> None:
    """Have the process that forks do this one's work, and stay until that is done."""
    request = pickle.dumps((os.getppid(), sys.argv, dict(os.environ), os.getcwd()))
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        socket.send_fds(asked, [len(request).to_bytes(NUMBER, "big")], [0, 1, 2])
        asked.sendall(request)
        fork = os.pidfd_open(int.from_bytes(asked.recv(NUMBER, socket.MSG_WAITALL), "big"))
    signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(fork, signal.SIGTERM))
    select.select([fork], [], [])


# -- the work ----------------------------------------------------------------------------


def work() -> None:
    """Do what the arguments say, as `python -m` of them does."""
    sys.path[0] = os.getcwd()
    sys.path += [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if "TXNKV_TEST_JVM" in os.environ:  # the fork does not descend from it
        from txnkv.spark import java

        java.jvm = partial(java.find, int(os.environ["TXNKV_TEST_JVM"]))
    if sys.argv[0] == "pyspark.daemon":
        import pyspark.daemon

        pyspark.daemon.manager()
    else:
        alone(sys.argv[0])


def alone(module: str) -> None:
    """Run a module that connects to its JVM, connected before it is imported."""
    import runpy

    secret = os.environ["PYTHON_WORKER_FACTORY_SECRET"].encode()
    connected = socket.create_connection(
        ("127.0.0.1", int(os.environ["PYTHON_WORKER_FACTORY_PORT"]))
    )
    file = connected.makefile("rwb", 65536)
    file.write(struct.pack("!i", len(secret)) + secret)
    file.flush()
    reply = file.read(*struct.unpack("!i", file.read(4)))
    if reply != b"ok":
        sys.exit(f"Spark answered {reply!r}")

    import pyspark.util
    import pyspark.worker_util

    def connect(*_: Any) -> Any:
        return file, connected

    pyspark.util.local_connect_and_auth = connect
    pyspark.worker_util.local_connect_and_auth = connect  # imported before this
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _, where, *sys.argv = sys.argv
    if where == "serve":
        serve(socket.socket(fileno=int(sys.argv[0])))
    elif sys.platform == "linux":
        ask(where)
    else:
        work()
