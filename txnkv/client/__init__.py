"""The handles of a store: client, tables, scans, topics, consumers, producers, subscriptions."""
