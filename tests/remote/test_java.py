"""The Java program of docs/remote.md, with Flight from Maven Central and no code of ours."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from txnkv.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
POM = """<project><modelVersion>4.0.0</modelVersion><groupId>t</groupId><artifactId>t</artifactId>
<version>1</version><dependencies>
<dependency><groupId>org.apache.arrow</groupId><artifactId>flight-core</artifactId>
<version>18.3.0</version></dependency>
<dependency><groupId>org.apache.arrow</groupId><artifactId>arrow-memory-netty</artifactId>
<version>18.3.0</version></dependency>
</dependencies></project>"""
PROGRAM = """import org.apache.arrow.flight.*;
import org.apache.arrow.memory.*;
public class Reads { public static void main(String[] given) throws Exception {
%s
} }"""


@pytest.mark.slow
def test_a_java_client_reads_a_table(
    store: txnkv.Client, serve: Callable[..., Server], tmp_path: Path
) -> None:
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("no Maven or no Java compiler")
    store.create_table("orders", txnkv.Schema({"id": "int64", "v": "string"}, primary_key=["id"]))
    with store.transaction() as txn:
        txn.insert("orders", (1, "one"))
        txn.insert("orders", (2, "two"))
    (block,) = re.findall(r"```java\n(.*?)```", PAGE.read_text(), re.S)
    block = block.replace("8815", str(serve().port))
    (tmp_path / "Reads.java").write_text(PROGRAM % block)
    (tmp_path / "pom.xml").write_text(POM)
    maven = ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=classpath"]
    got = subprocess.run(maven, cwd=tmp_path, capture_output=True, text=True, check=False)
    if got.returncode and re.search("Could not transfer|Unknown host|offline", got.stdout):
        pytest.skip("Maven Central cannot be reached")
    assert got.returncode == 0, got.stdout
    classes = f"{(tmp_path / 'classpath').read_text().strip()}:{tmp_path}"
    command = ["javac", "-cp", classes, "Reads.java"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (opened,) = re.findall(r"--add-opens=\S+", PAGE.read_text())
    said = subprocess.run(
        ["java", opened, "-cp", classes, "Reads"], capture_output=True, text=True, check=False
    )
    assert said.stdout.split() == ["id", "v", "1", "one", "2", "two"], said.stderr
