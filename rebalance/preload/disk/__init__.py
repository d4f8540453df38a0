"""Expert records on disk: layout, origin, direct reads."""
