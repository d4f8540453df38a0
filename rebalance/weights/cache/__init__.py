"""Phase 1: the host weight cache, one process per host that holds expert records in memory."""
