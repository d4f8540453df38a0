"""Phase 1, disk to host: the loader, and the first fill of a rank."""
