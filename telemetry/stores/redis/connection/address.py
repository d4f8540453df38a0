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
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote

from eplb.errors import ConfigError

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
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
    timeout_s: float = 1.0  # without a byte from the server
    deadline_s: float = 3.0  # for one change or query: no attempt starts later
    breaker_failures: int = 5  # failed attempts in a row, after which calls fail at once
    cool_down_s: float = 1.0  # for so long, before one call may try again
    max_samples: int = 500_000  # of one run; the oldest are forgotten for new ones


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
    prefix: str = "eplb"  # of every key; tells installations on one server apart
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
    parts = _split(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"a Redis URL starts with {parts.scheme!r}, expected one of: {', '.join(SCHEMES)}"
        )
    if "@" in parts.path + parts.query + parts.fragment:
        raise ConfigError(
            f"a URL {parts.scheme}:// has an '@' behind its first '/', '?' or '#', expected the "
            "password percent-encoded (%2F, %3F, %23)"
        )
    options = _options(parts)
    if parts.scheme == "unix":
        address = _of_socket_file(parts, options)
    elif parts.scheme.endswith("+cluster"):
        address = _of_cluster(parts)
    else:
        address = _of_server(parts)
    login, _, _ = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    tls = _tls(options) if parts.scheme.startswith("rediss") else None
    address = replace(address, username=unquote(username), password=unquote(password), tls=tls)
    address = replace(address, prefix=_prefix(options), limits=_limits(options))
    if options:
        known = ["prefix", *(known.name for kind in (Limits, Tls) for known in fields(kind))]
        raise ConfigError(
            f"{address}: unknown option {min(options)!r}, expected one of: {', '.join(known)} "
            "(the last four with TLS only)"
        )
    return address


def _split(url: str) -> SplitResult:
    """As ``urllib.parse.urlsplit``, which in some versions refuses an IPv6 address among hosts."""
    found = _URL.fullmatch(url)
    if found is None:
        return SplitResult(url.partition(":")[0].lower(), "", "", "", "")
    scheme, *others = (part or "" for part in found.groups())
    return SplitResult(scheme.lower(), *others)


def without_password(url: str) -> str:
    """Return a URL of any scheme as it may be shown."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    login, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{place.partition('?')[0]}"


def _of_server(parts: SplitResult) -> RedisAddress:
    hosts = _hosts(parts)
    if len(hosts) != 1:
        raise ConfigError(f"{parts.scheme}://{_place(parts)}: {len(hosts)} hosts, expected one")
    return RedisAddress(hosts, database=_number("database", parts.path.strip("/") or "0"))


def _of_cluster(parts: SplitResult) -> RedisAddress:
    if parts.path.strip("/"):
        raise ConfigError(
            f"{parts.scheme}://{_place(parts)} names database {parts.path.strip('/')!r}, "
            "expected none: a cluster has but one"
        )
    return RedisAddress(_hosts(parts), is_cluster=True)


def _of_socket_file(parts: SplitResult, options: dict[str, str]) -> RedisAddress:
    if not parts.path or _place(parts):
        raise ConfigError("a URL unix:// names no socket file, expected unix:///path/to/socket")
    database = _number("db", options.pop("db", "0"))
    return RedisAddress((), socket_path=unquote(parts.path), database=database)


def _hosts(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    return tuple(_host(parts.scheme, text) for text in _place(parts).split(","))


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


def _place(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _options(parts: SplitResult) -> dict[str, str]:
    try:
        return dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError as exc:
        if not parts.query:
            return {}
        raise ConfigError(
            f"{parts.scheme}://{_place(parts)}: options that are no name=value&name=value"
        ) from exc


def _tls(options: dict[str, str]) -> Tls:
    texts = {name: options.pop(name, "") for name in ("ca_certs", "certfile", "keyfile")}
    checks = options.pop("check_hostname", "true")
    if checks not in ("true", "false"):
        raise ConfigError(f"Redis option check_hostname is {checks!r}, expected true or false")
    return Tls(**texts, check_hostname=checks == "true")


def _prefix(options: dict[str, str]) -> str:
    prefix = options.pop("prefix", "eplb")
    if not prefix or "{" in prefix:
        raise ConfigError(f"Redis option prefix is {prefix!r}, expected a name without braces")
    return prefix


def _limits(options: dict[str, str]) -> Limits:
    given: dict[str, Any] = {}
    for name, default in vars(Limits()).items():
        text = options.pop(name, None)
        if text is not None:
            given[name] = _positive(name, text, type(default))
    return Limits(**given)


def _positive(name: str, text: str, kind: type[int] | type[float]) -> int | float:
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
