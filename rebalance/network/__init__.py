"""Framed messages between hosts: listener, handshake, back-off, throttle."""
