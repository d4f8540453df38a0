"""One link for the bytes of experts: frames, authentication, TLS, limits, a client and a server."""
