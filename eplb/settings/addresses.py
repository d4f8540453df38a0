"""Addresses that a service may listen on. Hosts of ranks read them without an HTTP library."""

from __future__ import annotations

import ipaddress

from eplb.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether a host is reached from itself alone; False for a name of any other kind."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_address(host: str) -> str:
    """Give the address of a loopback host.

    Raises:
        ConfigError: any other host, because requests are not authenticated.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"http.host is {host!r}, expected a loopback address such as 127.0.0.1, "
            "because the HTTP service has no secret to authenticate requests with"
        )
    return numeric_address(host)


def numeric_address(host: str, setting: str = "http.host") -> str:
    """Give an address as it is bound.

    Raises:
        ConfigError: it would have to be looked up.
    """
    name = "127.0.0.1" if host == "localhost" else host
    try:
        return str(ipaddress.ip_address(name))
    except ValueError as exc:
        raise ConfigError(f"{setting} is {host!r}, expected a numeric address") from exc
