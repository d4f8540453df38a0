"""What the settings of all links have in common: addresses, the secret, bandwidth."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from eplb.errors import ConfigError

HostAddress = tuple[str, int]  # a numeric address, because looking a name up has no deadline

LEAST_SECRET_BYTES = 16
# A tenth of a 100 Gbit/s link, which also carries requests and KV caches: 35 ms for 44 MB.
SERVING_BYTES_PER_SECOND = 1.25e9


def check_limits(settings: Mapping[str, Any], between: str) -> None:
    """Refuse a secret that could be guessed, and limits that let nothing through.

    Args:
        settings: of a link, by name.
        between: "hosts" or "ranks", for messages.

    Raises:
        ConfigError: with the setting, and what was expected.
    """
    if len(settings["secret"]) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"a secret of {len(settings['secret'])} bytes between {between}, "
            f"expected {LEAST_SECRET_BYTES} or more"
        )
    if settings["max_transfers"] < 1:
        raise ConfigError(f"max_transfers is {settings['max_transfers']}, expected 1 or more")
    for name in ("bytes_per_second", "silence_s", "deadline_s", "back_off_s"):
        if not settings[name] > 0:
            raise ConfigError(f"{name} is {settings[name]}, expected more than 0")


def check_address(address: HostAddress) -> None:
    """Refuse an address that would have to be looked up.

    Raises:
        ConfigError: it is no number, or its port is none.
    """
    host, port = address
    try:
        ipaddress.ip_address(host)
    except ValueError as exc:
        raise ConfigError(f"host {host!r}, expected a numeric address") from exc
    if not 0 < port < 2**16:
        raise ConfigError(f"port {port} of host {host}, expected 1..65535")
