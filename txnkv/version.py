"""The version, which setuptools reads from here as well."""

__version__ = "0.1.0"
