"""spark-submit, in one process and with executors of their own, txnkv installed or handed over;
with an environment handed over, on a standalone cluster that does not see the store.

One program: batch writes under a token into a table and a topic, a stream from the topic into the
table through a Python function of a module that goes along by `--py-files`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tests.remote.conftest import Serving
from tools.spark_cluster import spark_cluster

from .conftest import KEEP_QUIET, SCHEMA

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ALONG = """
def shout(text):
    return text.upper() + "!"
"""

PROGRAM = """
import os, sys
import along
import txnkv.spark
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

store, checkpoint = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
client = txnkv.connect(store)
with client.transaction(timeout=None) as txn:
    for what, columns in (({"table": "t"}, ["id", "v"]), ({"topic": "events"}, ["key", "value"])):
        rows = spark.range(100, numPartitions=4).selectExpr(
            "id", "'old' AS v", "CAST(id AS STRING) AS key", "concat('v', id) AS value"
        )
        options = txnkv.spark.options(txn, **what)
        rows.select(columns).write.format("txnkv").options(**options).mode("append").save()

log = spark.readStream.format("txnkv").options(
    path=store, topic="events", startingOffsets="earliest", maxOffsetsPerTrigger=30
).load()
rows = log.select(
    log["key"].cast("string").cast("long").alias("id"),
    udf(along.shout)(log["value"].cast("string")).alias("v"),
)
query = rows.writeStream.format("txnkv").options(
    path=store, table="t", operation="upsert", checkpointLocation=checkpoint
).trigger(availableNow=True).start()
query.awaitTermination()

def whose(index, rows):
    import txnkv.core.native
    yield os.getppid(), txnkv.__file__

for parent, file in spark.sparkContext.parallelize(range(8), 8).mapPartitionsWithIndex(
    whose
).distinct().collect():
    print("worker", parent, file)
"""


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python that has what txnkv needs, but not txnkv."""
    home = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    site = Path(next((home / "lib").glob("python3*"))) / "site-packages"
    has = Path(pa.__file__).parents[1]
    for found in has.iterdir():
        if "txnkv" not in found.name and found.suffix not in (".pth", ".egg-link"):
            (site / found.name).symlink_to(found)
    return home / "bin" / "python"


def submit(
    tmp_path: Path, store: str, master: str, python: str, *along: Path, archive: Path | None = None
) -> list[str]:
    """Run the program; the `txnkv` that each worker imported, one for each executor."""
    import pyspark

    module, program = tmp_path / "along.py", tmp_path / "program.py"
    module.write_text(ALONG)
    program.write_text(PROGRAM)
    order = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", master]
    order += ["--py-files", ",".join(map(str, (module, *along)))]
    if archive is not None:
        order += ["--archives", f"{archive}#env"]
    for key, value in (*KEEP_QUIET, ("spark.executor.memory", "600m")):
        order += ["--conf", f"{key}={value}"]
    order += [str(program), store, str(tmp_path / "checkpoint")]
    environ = os.environ | {
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable if archive is not None else python,
        "SPARK_LOCAL_IP": "127.0.0.1",
        # Spark hands --py-files to tasks, and not to what plans a stream.
        "PYTHONPATH": ":".join(map(str, along)),
    }
    done = subprocess.run(
        order, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    return [line.split()[2] for line in done.stdout.splitlines() if line.startswith("worker ")]


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,700]"])
@pytest.mark.parametrize("handed", [False, True], ids=["installed", "handed over"])
def test_a_program(
    tmp_path: Path,
    store_path: Path,
    client: txnkv.Client,
    packed: Path,
    bare_python: Path,
    master: str,
    handed: bool,
) -> None:
    client.create_table("t", SCHEMA)
    client.create_topic("events", partitions=2)
    python, along = (bare_python, [packed]) if handed else (Path(sys.executable), [])
    imported = submit(tmp_path, str(store_path), master, str(python), *along)
    assert len(imported) == (1 if master == "local[2]" else 2)
    assert all((packed.name in path) == handed for path in imported)
    require_rows(client)


def require_rows(client: txnkv.Client) -> None:
    found = client.table("t").scan(ordered=True).to_arrow().to_pylist()
    assert found == [{"id": id, "v": f"V{id}!"} for id in range(100)]


NEEDED = (
    "apsw", "cffi", "_cffi_backend", "click", "lmdb", "pyarrow", "rich", "markdown_it", "mdurl",
    "pygments", "pycparser", "typing_extensions",
)  # fmt: skip


def test_an_environment_that_is_handed_over(
    tmp_path: Path, store_path: Path, client: txnkv.Client, packed: Path
) -> None:
    """As venv-pack makes it, without PySpark, which each worker of the cluster has."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("hides the store's folder by a mount namespace, which takes root and unshare")
    client.create_table("t", SCHEMA)
    client.create_topic("events", partitions=2)
    home = tmp_path / "env"  # here it is unpacked for what plans, in the driver's directory
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    site = Path(next((home / "lib").glob("python3*"))) / "site-packages"
    for found in Path(pa.__file__).parents[1].iterdir():
        if found.name.split(".")[0] in NEEDED:
            (site / found.name).symlink_to(found)
    with zipfile.ZipFile(packed) as file:
        file.extractall(site)
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1, dereference=False) as tar:
        tar.add(home / "bin", "bin")
        tar.add(home / "pyvenv.cfg", "pyvenv.cfg")
        tar.dereference = True  # packages are copied, the interpreter is the host's
        tar.add(home / "lib", "lib")
    folder = tmp_path / "work"
    folder.mkdir()
    serving = Serving(store_path)
    serving.start()
    try:
        with spark_cluster(folder, hidden=store_path) as master:
            imported = submit(
                tmp_path, serving.address, master, "./env/bin/python", archive=archive
            )
    finally:
        serving.kill()
    assert len(imported) == 2
    assert all(str(folder) in path and "/env/lib/" in path for path in imported)
    require_rows(client)
