"""Phase 2, host or peer to device: sources, lanes, digest checks, the staging ring."""
