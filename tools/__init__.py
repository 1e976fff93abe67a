"""Programs for those who work on txnkv or look after a store."""
