"""Readers for Spark: of tables at a snapshot, of topics, of changes of tables."""
