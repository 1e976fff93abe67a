"""Writers for Spark: of tables and topics, in batches and streams."""
