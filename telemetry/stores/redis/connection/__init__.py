"""Connections to Redis: addresses, retries, the circuit breaker, the driver."""
