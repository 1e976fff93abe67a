"""The check for a Java that can run Spark, made before Spark fails with pages of text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Final

from txnkv.errors import NotSupportedError

MINIMUM: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')


def require_java() -> int:
    """The major version of the Java that Spark will start.

    Raises:
        NotSupportedError: there is none, or it is older than 17.
    """
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if program is None or not os.path.exists(program):
        where = f"JAVA_HOME is {home}" if home else "there is no java on PATH"
        raise NotSupportedError(
            f"Spark needs Java {MINIMUM} or later, and {where}: install one, or set JAVA_HOME"
        )
    told = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    found = _VERSION.search(told.stderr + told.stdout)
    major = int(found[2] if found and found[1] == "1" and found[2] else found[1]) if found else 0
    if major < MINIMUM:
        raise NotSupportedError(
            f"Spark needs Java {MINIMUM} or later, and {program} is "
            f"{major or 'of an unknown version'}: install a newer one, or set JAVA_HOME"
        )
    return major
