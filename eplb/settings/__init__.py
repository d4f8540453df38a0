"""Settings that components declare: one tree of sections, loaded from one file."""
