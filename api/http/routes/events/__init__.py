"""Events as they happen: read once from the store, held once for all clients."""
