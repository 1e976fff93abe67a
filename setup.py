"""The builds of the C core and of the native hot path; all else stands in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
NATIVE = Extension(
    "txnkv._native",
    sources=sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("common", "codec", "rowset", "memory", "tablet", "native")
        for path in (ROOT / "csrc" / folder).glob("*.c")
    ),
    depends=[path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("csrc/*/*.h"))],
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden"],
)

setup(cffi_modules=["csrc/build_core.py:ffibuilder"], ext_modules=[NATIVE])
