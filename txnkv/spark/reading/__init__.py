"""What Spark reads: tables at a snapshot, topics, changes of tables."""
