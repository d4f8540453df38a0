"""What every process of a deployment knows of it: name, store, load windows, and addresses."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError, UnfitSetting

DEPLOYMENT = "demo"  # the name of a deployment that is given none
STORE_FILE = "store.sqlite"  # file in the state folder if no store is named


MOST_NAME = 128
# A name is part of keys, file names, lines and URLs; that of an EP group stands behind a slash.
_PART = r"[^\s./{}\\\x00-\x1f\x7f][^\s/{}\\\x00-\x1f\x7f]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
NAME_RULE = f"1 to {MOST_NAME} characters without blanks, braces or a leading dot: west, west/pp0"


def is_deployment_name(name: object) -> bool:
    """Whether a deployment may have this name; the one rule of all that take one."""
    return (
        isinstance(name, str)
        and len(name) <= MOST_NAME
        and name.isprintable()
        and _NAME.fullmatch(name) is not None
    )


def check_deployment_name(name: object) -> None:
    """Refuse a name that a deployment cannot have.

    Raises:
        ConfigError: it is none.
    """
    if not is_deployment_name(name):
        raise ConfigError(f"deployment {name!r:.160} cannot be used, expected {NAME_RULE}")


@dataclass(frozen=True)
class DeploymentSettings:
    """Where a deployment keeps what is its own."""

    name: Annotated[
        str,
        Setting(
            "name in the store and on the hosts",
            short="deployment_name",
            min_length=1,
            max_length=64,
        ),
    ] = DEPLOYMENT
    state_dir: Annotated[Path, Setting("folder of the store, the weights and the journals")] = Path(
        ".eplb"
    )
    store: Annotated[
        str, Setting("URL of the load store; empty: a file in the state folder", secret=True)
    ] = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not is_deployment_name(self.name):
            raise UnfitSetting("name", self.name, NAME_RULE)
        if self.store == "memory:":
            raise UnfitSetting("store", self.store, "a store that several processes can share")

    @property
    def store_url(self) -> str:
        """URL or file of the store; may hold a password."""
        return self.store or str(self.state_dir / STORE_FILE)


@dataclass(frozen=True)
class WindowSettings:
    """Load windows, in steps of the engine."""

    window_steps: Annotated[
        int,
        Setting(
            "forward passes in a load window; the demo: as many as 16,384 tokens of all ranks take",
            at_least=1,
        ),
    ] = 64
    sample_steps: Annotated[
        int,
        Setting(
            "forward passes in a sample, a divisor of window_steps; the demo: a quarter of them",
            at_least=1,
        ),
    ] = 16
    window_seconds: Annotated[
        float,
        Setting(
            "length of a load window; 0: window_steps",
            unit="s",
            at_most=3600,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window_steps % self.sample_steps:
            expected = f"a divisor of telemetry.window_steps, {self.window_steps}"
            raise UnfitSetting("sample_steps", self.sample_steps, expected)


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
