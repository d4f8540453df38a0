"""Host weight caches of other hosts as a source of records."""
