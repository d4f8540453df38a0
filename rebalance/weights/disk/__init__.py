"""Expert records on disk: origin, record file, loader, direct reads."""
