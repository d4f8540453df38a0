"""Addresses that a service may listen on. Hosts of ranks read them without an HTTP library."""

from __future__ import annotations

import ipaddress
import re

from eplb.errors import ConfigError

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
# The last label has a letter: "10.0.0.256" is no name, but a misspelt address.
_NAME = rf"({_LABEL}\.)*(?=[0-9-]*[A-Za-z]){_LABEL}\.?"


def is_host(text: str) -> bool:
    """Return whether a text is a numeric address, or may be the name of a host."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(_NAME, text) is not None
    return True


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
