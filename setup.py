"""The builds of the C core and of the native hot path; all else stands in pyproject.toml."""

import copy
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

ROOT = Path(__file__).resolve().parent
NATIVE = Extension(
    "txnkv._native",
    sources=sorted(
        path.relative_to(ROOT).as_posix()
        for part in (
            "common/",
            "codec/",
            "log/batch",
            "log/messages_encode",
            "rowset/",
            "memory/",
            "tablet/",
            "native/",
        )
        for path in (ROOT / "csrc").glob(f"{part}*.c")
    ),
    depends=[path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("csrc/*/*.h"))],
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],  # semaphores, in a library of their own until glibc 2.34
)
NO_COMPILER = """

txnkv has parts in C, and they could not be built here. Without a wheel for this machine, pip
needs a C compiler and Python's headers:

    Debian, Ubuntu     apt-get install build-essential python3-dev
    Fedora, RHEL       dnf install gcc python3-devel
    Alpine             apk add build-base python3-dev linux-headers
    macOS              xcode-select --install

What failed: """
NO_GIL = """

txnkv needs a CPython with the global interpreter lock, and this is another one: {}.
Use 3.11 or later without a "t" behind the version (python3.13, not python3.13t)."""


class BuildPackages(build_py):
    """A build without modules that an earlier one left and the sources do not have any more."""

    def run(self) -> None:
        folder = Path(self.build_lib).resolve()
        if not self.editable_mode and folder != ROOT:
            for name in ("txnkv", "pyspark_txnkv"):
                shutil.rmtree(folder / name, ignore_errors=True)
        super().run()


class BuildCore(build_ext):
    """A build that says what it needs."""

    def run(self) -> None:
        if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise CompileError(NO_GIL.format(sys.version.partition("\n")[0]))
        try:
            super().run()
        except (CompileError, ExecError, LinkError, PlatformError) as error:
            raise CompileError(f"{NO_COMPILER}{error}") from error

    def build_extension(self, ext: Extension) -> None:
        """Build one with objects of its own.

        They are built at the same time, of sources that both have: an object of one would be
        written anew while the other is linked with it, which leaves out what is in there.
        """
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name.rpartition(".")[2])
        super(BuildCore, own).build_extension(ext)


setup(
    cffi_modules=["csrc/build_core.py:ffibuilder"],
    ext_modules=[NATIVE],
    cmdclass={"build_ext": BuildCore, "build_py": BuildPackages},
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},  # one wheel for all Pythons from there
        "build_ext": {"parallel": 2},  # the two extensions
    },
)
