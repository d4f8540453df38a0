"""What the links of host caches and of ranks have in common: settings, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eplb.errors import ConfigError
from rebalance.weights.link.link_settings import HostLinkSettings, RankLinkSettings

SECRET = b"known to both of the deployment's links"
LINKS = [HostLinkSettings, RankLinkSettings]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    ("address", "settings", "words"),
    [
        (("127.0.0.1", 23731), {"secret": b"short"}, "5 bytes .* 16"),
        (("node-7", 23731), {}, "'node-7'"),
        (("127.0.0.1", 0), {}, r"port 0 of .* expected 1\.\.65535"),
        (("127.0.0.1", 23731), {"silence_s": 0}, "silence_s is 0"),
    ],
)
def test_link_settings_that_cannot_be_used_are_refused(
    link: Callable[..., object], address: tuple[str, int], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        link((address,), **({"secret": SECRET} | settings))


@pytest.mark.parametrize("link", LINKS)
def test_secret_of_a_link_is_not_printed(link: Callable[..., object]) -> None:
    assert "known" not in repr(link((("127.0.0.1", 23731),), secret=SECRET))
