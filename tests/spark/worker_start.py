"""The start of a Python process that works for the tests' Spark: `worker_start.py MODULE ARG...`.

Spark forks its workers from daemons that have imported next to nothing, and each that is new, as
after every failed task, imports all it needs: here the daemon has done that. And it gives a process
that it does not fork 10 s to connect, whatever the machine has to do: here it connects first.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import struct
import sys
from typing import Any

AHEAD = (
    "pandas",
    "pyarrow.compute",
    "pyspark.worker",
    "txnkv.spark.reading.readers",
    "txnkv.spark.source",
    "txnkv.spark.writing.job_writer",
)


def daemon(module: str) -> None:
    """Fork workers that run a module.

    Args:
        module: as in `pyspark.daemon`'s own arguments.
    """
    import pyspark.daemon

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not be there after a fork
    for name in (*AHEAD, module):
        importlib.import_module(name)
    pyspark.daemon.manager()


def alone(module: str) -> None:
    """Run a module that connects to its JVM, connected before it is imported."""
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

    def connect(*_: Any) -> Any:
        return file, connected

    pyspark.util.local_connect_and_auth = connect
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "pyspark.daemon":
        daemon(sys.argv[1])
    else:
        alone(sys.argv[0])
