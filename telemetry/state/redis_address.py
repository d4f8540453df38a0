"""The address of a Redis store: the parsed URL, with login and TLS settings.

    redis://[user[:password]@]host[:port][/database][?option=value&...]
    rediss://...                                   the same over TLS
    redis+cluster://[user[:password]@]host:port,host:port[?...]
    rediss+cluster://...
    unix://[user[:password]@]/path/to/socket[?db=0&...]

A password is never part of a message, a log line or a repr: messages use ``str(address)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, unquote

from eplb.errors import ConfigError

FORMS = (
    "redis://HOST:PORT",
    "rediss://HOST:PORT",
    "redis+cluster://HOST:PORT,...",
    "rediss+cluster://HOST:PORT,...",
    "unix:///PATH",
)
SCHEMES = tuple(form.partition(":")[0] for form in FORMS)
DEFAULT_PORT = 6379
MOST = {float: 3600, int: 100_000_000}  # seconds of a time, and of what is counted
# Scheme, place, path, query and fragment (RFC 3986, appendix B).
_URL = re.compile(r"([^:/?#]+)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Tls:
    """TLS settings: how server and client authenticate. Paths of PEM files; "" is the default."""

    ca_certs: str = ""  # "": the system's
    certfile: str = ""  # the client's, for servers that require one
    keyfile: str = ""
    check_hostname: bool = True


@dataclass(frozen=True)
class Limits:
    """Timeouts, circuit breaker and limits of a store."""

    connect_timeout_s: float = 1.0
    timeout_s: float = 1.0  # longest wait for a byte from the server
    deadline_s: float = 3.0  # limit of one change or query: no attempt starts later
    breaker_failures: int = 5  # failed attempts in a row, after which calls fail at once
    cool_down_s: float = 1.0  # time until one call may try again
    max_samples: int = 500_000  # samples kept of one run; the oldest are removed


_LIMITS: dict[str, type[int] | type[float]] = {
    name: type(default) for name, default in vars(Limits()).items()
}


@dataclass(frozen=True)
class RedisAddress:
    """One server, or some nodes of one cluster."""

    hosts: tuple[tuple[str, int], ...]  # empty for a socket file
    socket_path: str = ""
    is_cluster: bool = False
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: Tls | None = None
    prefix: str = "eplb"  # start of every key; separates installations on one server
    limits: Limits = Limits()

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        if self.socket_path:
            return f"unix://{user}{self.socket_path}?db={self.database}"
        scheme = ("rediss" if self.tls else "redis") + ("+cluster" if self.is_cluster else "")
        hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        return f"{scheme}://{user}{hosts}" + ("" if self.is_cluster else f"/{self.database}")


def parse_address(url: str) -> RedisAddress:
    """Parse a URL.

    Raises:
        ConfigError: a part that cannot be used; it never shows what stands before the "@".
    """
    # Not urllib.parse.urlsplit, which in some versions refuses an IPv6 address among hosts.
    found = _URL.fullmatch(url)
    scheme = found[1].lower() if found else url.partition(":")[0].lower()
    if found is None or scheme not in SCHEMES:
        raise ConfigError(
            f"a Redis URL starts with {scheme!r}, expected one of: {', '.join(SCHEMES)}"
        )
    place, path, query, fragment = (part or "" for part in found.groups()[1:])
    if "@" in path + query + fragment:
        raise ConfigError(
            f"a URL {scheme}:// has an '@' behind its first '/', '?' or '#', expected the "
            "password percent-encoded (%2F, %3F, %23)"
        )
    login, _, hosts = place.rpartition("@")
    username, _, password = login.partition(":")
    options = _options(query, f"{scheme}://{hosts}")
    limits = {name: _positive(name, options, kind) for name, kind in _LIMITS.items()}
    address = RedisAddress(
        *_place(scheme, hosts, path, options),
        username=unquote(username),
        password=unquote(password),
        tls=_tls(options) if scheme.startswith("rediss") else None,
        prefix=options.pop("prefix", "eplb"),
        limits=Limits(**{name: value for name, value in limits.items() if value is not None}),
    )
    if not address.prefix or "{" in address.prefix:
        raise ConfigError(
            f"Redis option prefix is {address.prefix!r}, expected a name without braces"
        )
    if options:
        known = ["prefix", *_LIMITS, *(known.name for known in fields(Tls))]
        raise ConfigError(
            f"{address}: unknown option {min(options)!r}, expected one of: {', '.join(known)} "
            "(the last four with TLS only)"
        )
    return address


_Place = tuple[tuple[tuple[str, int], ...], str, bool, int]


def _place(scheme: str, place: str, path: str, options: dict[str, str]) -> _Place:
    """Hosts, socket file, whether it is a cluster, and database."""
    if scheme == "unix":
        if not path or place:
            raise ConfigError("a URL unix:// names no socket file, expected unix:///path/to/socket")
        return (), unquote(path), False, _number("database", options.pop("db", "0"))
    hosts = tuple(_host(scheme, text) for text in place.split(","))
    database = path.strip("/")
    if scheme.endswith("+cluster"):
        if database:
            raise ConfigError(
                f"{scheme}://{place} names database {database!r}, expected none: a cluster has but "
                "one"
            )
        return hosts, "", True, 0
    if len(hosts) != 1:
        raise ConfigError(f"{scheme}://{place}: {len(hosts)} hosts, expected one")
    return hosts, "", False, _number("database", database or "0")


def _host(scheme: str, text: str) -> tuple[str, int]:
    host, port = text, ""
    if ":" in text.rpartition("]")[2]:  # an IPv6 address stands in brackets
        host, _, port = text.rpartition(":")
    host = unquote(host.removeprefix("[").removesuffix("]"))
    if not host:
        raise ConfigError(f"a URL {scheme}:// has a place {text!r} without a host, expected one")
    number = _number("port", port or str(DEFAULT_PORT))
    if not 0 < number < 65536:
        raise ConfigError(f"a Redis URL has port {number}, expected 1..65535")
    return host, number


def _options(query: str, shown: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError as exc:
        raise ConfigError(f"{shown}: options that are no name=value&name=value") from exc


def _tls(options: dict[str, str]) -> Tls:
    texts = {name: options.pop(name, "") for name in ("ca_certs", "certfile", "keyfile")}
    checks = options.pop("check_hostname", "true")
    if checks not in ("true", "false"):
        raise ConfigError(f"Redis option check_hostname is {checks!r}, expected true or false")
    return Tls(**texts, check_hostname=checks == "true")


def _positive(name: str, options: dict[str, str], kind: type[int] | type[float]) -> Any:
    """A limit that the options name; None: its default."""
    text = options.pop(name, None)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value <= MOST[kind]:
        raise ConfigError(
            f"Redis option {name} is {text!r}, expected a number greater than 0 and at most "
            f"{MOST[kind]}"
        )
    return value


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"a Redis URL has {name} {text!r}, expected a number")
    return int(text)
