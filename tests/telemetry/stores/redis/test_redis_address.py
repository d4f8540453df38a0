"""Redis URLs are taken apart, and no password is ever shown."""

from __future__ import annotations

import pytest

from eplb.errors import ConfigError
from telemetry import open_store
from telemetry.stores.redis.connection.address import Tls, parse_address, without_password
from telemetry.stores.redis.keys import Keys


def test_url_names_host_port_database_and_user() -> None:
    address = parse_address("redis://rank:s%40cret@redis.local:7000/3?timeout_s=0.5&prefix=staging")

    assert address.hosts == (("redis.local", 7000),)
    assert (address.database, address.username, address.password) == (3, "rank", "s@cret")
    assert (address.limits.timeout_s, address.limits.deadline_s) == (0.5, 3.0)
    assert (address.prefix, address.tls, address.is_cluster) == ("staging", None, False)


def test_password_is_not_shown() -> None:
    address = parse_address("rediss://rank:secret@redis.local")

    assert str(address) == "rediss://rank@redis.local:6379/0"
    assert "secret" not in repr(address)


def test_cluster_has_several_hosts() -> None:
    address = parse_address("redis+cluster://:secret@a:1,[::1]:2,c")

    assert address.is_cluster
    assert address.hosts == (("a", 1), ("::1", 2), ("c", 6379))
    assert str(address) == "redis+cluster://a:1,[::1]:2,c:6379"


def test_socket_file_is_named_by_its_path() -> None:
    address = parse_address("unix://rank:secret@/run/redis.sock?db=2")

    assert (address.socket_path, address.database) == ("/run/redis.sock", 2)
    assert str(address) == "unix://rank@/run/redis.sock?db=2"


def test_tls_takes_the_names_of_files() -> None:
    address = parse_address("rediss+cluster://a?ca_certs=/etc/ca.pem&check_hostname=false")

    assert address.tls == Tls(ca_certs="/etc/ca.pem", check_hostname=False)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://secret@host", "starts with 'http', expected one of: redis, rediss"),
        ("redis://u:secret@", "a place '' without a host"),
        ("redis://u:secret@a,b", "2 hosts, expected one"),
        ("redis://u:secret@a:x", "port 'x', expected a number"),
        ("redis://u:secret@a:70000", r"port 70000, expected 1\.\.65535"),
        ("redis://u:secret@a/x", "database 'x', expected a number"),
        ("redis+cluster://u:secret@a/1", "names database '1', expected none"),
        ("redis://u:sec/ret@a", "expected the password percent-encoded"),
        ("redis://u:secret@a?timeout=1", "unknown option 'timeout', expected one of: prefix, co"),
        ("redis://u:secret@a?ca_certs=x", "unknown option 'ca_certs'"),
        ("redis://u:secret@a?timeout_s=0", "timeout_s is '0', expected a number greater than 0"),
        ("redis://u:secret@a?max_samples=many", "max_samples is 'many'"),
        ("rediss://u:secret@a?check_hostname=1", "check_hostname is '1', expected true or false"),
        ("redis://u:secret@a?prefix=a{b", "expected a name without braces"),
        ("redis://u:secret@a?timeout_s", "no name=value"),
        ("unix://u:secret@", "names no socket file"),
    ],
)
def test_unusable_url_is_an_error_without_the_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_address(url)

    assert "sec" not in str(caught.value)


def test_unknown_scheme_is_an_error_without_the_password() -> None:
    with pytest.raises(ConfigError, match=r"unknown store 'mysql://u@host/x'") as caught:
        open_store("mysql://u:secret@host/x?y=secret", "demo")

    assert "secret" not in str(caught.value)
    assert without_password("u:secret@host") == "u@host"


@pytest.mark.parametrize("deployment", ["", "a{b", "a}b"])
def test_deployment_that_would_not_lie_in_one_slot_is_refused(deployment: str) -> None:
    with pytest.raises(ConfigError, match="expected a name without braces"):
        Keys("eplb", deployment)
