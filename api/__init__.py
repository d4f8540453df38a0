"""Settings, HTTP, page, terminal, command line, and the demo that wires all of it."""
