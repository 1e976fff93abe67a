"""The build of the C core; all else stands in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["csrc/build_core.py:ffibuilder"])
