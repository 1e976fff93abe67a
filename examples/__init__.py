"""Whole programs. `demo` is a package, which Spark's workers import as well."""
