"""A standalone Spark cluster on this machine, which may be kept from seeing a folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.processes import send, tree


@contextmanager
def spark_cluster(folder: Path, hidden: Path | None = None, memory: str = "600M") -> Iterator[str]:
    """The address of a standalone master with two workers, which take themselves for two machines.

    Args:
        folder: for their work and log.
        hidden: a folder that none of them sees; needs root.
        memory: of each worker.
    """
    from pyspark.find_spark_home import _find_spark_home

    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    parts = [["master.Master", "--host", "127.0.0.1", "--port", str(port)]]
    parts += [
        ["worker.Worker", "--host", host, "-c", "1", "-m", memory, "-d", str(folder), master]
        for host in ("127.0.0.2", "127.0.0.3")
    ]
    started = []
    with (folder / "cluster.log").open("ab") as log:
        for name, *options in parts:
            program = f"{_find_spark_home()}/bin/spark-class"
            command = [program, f"org.apache.spark.deploy.{name}", *options, "--webui-port", "0"]
            environment = {**os.environ, "SPARK_LOCAL_IP": options[1]}
            environment["PYSPARK_PYTHON"] = sys.executable
            command = blind(hidden, command)
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        yield master
    finally:
        for each in started:
            send(signal.SIGKILL, tree(each.pid))
            each.wait()


def blind(hidden: Path | None, command: list[str]) -> list[str]:
    """Return a command that runs another one where a folder is empty."""
    if hidden is None:
        return command
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, str(hidden), *command]
