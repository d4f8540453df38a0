"""Settings, HTTP service, page, terminal, command line, and the demo of a whole deployment."""
