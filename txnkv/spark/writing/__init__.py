"""What Spark writes: tables and topics, in batches and streams."""
