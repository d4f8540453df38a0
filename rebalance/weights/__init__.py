"""Expert weights outside of the live slots: host cache, disk, links between processes, sources."""
