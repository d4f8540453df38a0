"""Framed messages between hosts and local processes: listener, handshake, back-off, throttle."""
