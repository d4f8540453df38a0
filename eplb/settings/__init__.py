"""Settings: declared by the components that take them, read from one file, one tree of sections."""
