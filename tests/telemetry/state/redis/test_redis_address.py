"""Redis URLs are taken apart, and no password is ever shown."""

from __future__ import annotations

import pytest

from eplb.errors import ConfigError
from telemetry.state.redis import RedisBackend
from telemetry.state.redis_address import Tls, parse_address


def test_url_names_host_port_database_user_and_options_but_shows_no_password() -> None:
    address = parse_address("redis://rank:s%40cret@redis.local:7000/3?timeout_s=0.5&prefix=staging")

    assert address.hosts == (("redis.local", 7000),)
    assert (address.database, address.username, address.password) == (3, "rank", "s@cret")
    assert (address.limits.timeout_s, address.limits.deadline_s) == (0.5, 3.0)
    assert (address.prefix, address.tls, address.is_cluster) == ("staging", None, False)
    assert str(address) == "redis://rank@redis.local:7000/3"
    assert "s@cret" not in repr(address)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rediss://rank:secret@redis.local", "rediss://rank@redis.local:6379/0"),
        ("redis+cluster://:secret@a:1,[::1]:2,c", "redis+cluster://a:1,[::1]:2,c:6379"),
        ("unix://rank:secret@/run/redis.sock?db=2", "unix://rank@/run/redis.sock?db=2"),
    ],
)
def test_address_is_shown_with_its_defaults_and_without_the_password(url: str, shown: str) -> None:
    address = parse_address(url)

    assert (str(address), address.password) == (shown, "secret")
    assert address.is_cluster == ("cluster" in url)
    assert address.socket_path == ("/run/redis.sock" if "unix" in url else "")


def test_tls_takes_the_names_of_files() -> None:
    address = parse_address("rediss+cluster://a?ca_certs=/etc/ca.pem&check_hostname=false")

    assert address.tls == Tls(ca_certs="/etc/ca.pem", check_hostname=False)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://secret@host", "'http'"),
        ("redis://u:secret@", "''"),
        ("redis://u:secret@a,b", "2 hosts"),
        ("redis://u:secret@a:x", "port 'x'"),
        ("redis://u:secret@a:70000", r"port 70000, expected 1\.\.65535"),
        ("redis://u:secret@a/x", "database 'x'"),
        ("redis+cluster://u:secret@a/1", "database '1'"),
        ("redis://u:sec/ret@a", "%2F"),
        ("redis://u:secret@a?timeout=1", "'timeout'"),
        ("redis://u:secret@a?ca_certs=x", "'ca_certs'"),
        ("redis://u:secret@a?timeout_s=0", "timeout_s is '0'"),
        ("redis://u:secret@a?max_samples=many", "max_samples is 'many'"),
        ("rediss://u:secret@a?check_hostname=1", "check_hostname is '1'"),
        ("redis://u:secret@a?prefix=a{b", "prefix"),
        ("redis://u:secret@a?timeout_s", "name=value"),
        ("unix://u:secret@", "socket file"),
    ],
)
def test_unusable_url_is_an_error_without_the_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_address(url)

    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("deployment", ["", "a{b", "a}b"])
def test_deployment_that_would_not_lie_in_one_slot_is_refused(deployment: str) -> None:
    with pytest.raises(ConfigError):
        RedisBackend("redis://127.0.0.1:1", deployment)
