"""The host weight cache: one process per host that holds expert records."""
