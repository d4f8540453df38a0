"""Attacks on a running deployment and on its files, each with the claim that it tries to break.

    python -m benchmarks.attack [--only NAME ...] [--list]

Every attack uses real parts (processes, sockets, files, a redis-server), sends only to loopback
addresses, is bounded in count and time, and answers whether the claim held and the figure reached.
"""
