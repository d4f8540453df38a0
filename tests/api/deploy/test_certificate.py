"""Certificates that the HTTP service cannot use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eplb.errors import ConfigError
from tests.support.certificates import Authority

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.9"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_valid_certificate_is_accepted_until_its_end(authority: Authority) -> None:
    assert authority.issue(HERE).check().endswith("GMT")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("missing", "certificate none.pem cannot be read"),
        ("key of another", "does not fit certificate"),
        ("no certificate", "cannot be loaded: .*, expected PEM files"),
    ],
)
def test_certificate_whose_files_do_not_fit_is_refused(
    authority: Authority, part: str, words: str
) -> None:
    good = authority.issue(HERE)
    spoilt = {
        "missing": replace(good, chain=Path("none.pem")),
        "key of another": replace(good, key=authority.issue(ELSEWHERE).key),
        "no certificate": replace(good, chain=good.key),
    }

    with pytest.raises(ConfigError, match=words):
        spoilt[part].check()


def test_key_that_other_users_can_read_is_refused(authority: Authority) -> None:
    certificate = authority.issue(HERE)
    certificate.key.chmod(0o644)

    with pytest.raises(ConfigError, match=r"has mode 0644, expected one that keeps other users"):
        certificate.check()


def test_expired_certificate_is_refused(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="certificate has expired, expected one that is valid"):
        authority.issue(HERE, expired=True).check()
