"""The secret of a deployment: where it comes from, what is refused, the keys that it gives."""

from pathlib import Path
from typing import Any

import pytest

from eplb.errors import ConfigError
from rebalance.weights.link.secret import Secret, deployment_secret, write_token

GIVEN = "0123456789abcdef"
REMOTE = {"topology.hosts[0]": "127.0.0.1", "topology.hosts[1]": "10.0.0.1"}


def secret_of(tmp_path: Path, environ: dict[str, str] | None = None, **more: Any) -> Secret:
    given = {"addresses": REMOTE, "state_dir": tmp_path / "state"} | more
    return deployment_secret(given.pop("file", None), environ or {}, **given)


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "secret.txt"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_file_and_environment_give_the_same_keys(tmp_path: Path) -> None:
    of_file = secret_of(tmp_path, file=secret_file(tmp_path, f"{GIVEN}\n"))
    of_environment = secret_of(tmp_path, {"EPLB_SECRET": GIVEN})

    assert of_file.is_given
    assert of_file.derived("rank-links") == of_environment.derived("rank-links")
    assert of_file.fingerprint == of_environment.fingerprint


def test_each_purpose_has_a_key_of_its_own_and_no_text_shows_the_secret(tmp_path: Path) -> None:
    secret = secret_of(tmp_path, {"EPLB_SECRET": GIVEN})

    keys = {secret.derived(purpose) for purpose in ("rank-links", "host-links", "http", "join")}
    assert len(keys) == 4
    assert len(secret.derived("host-cache 0", 16)) == 16
    assert GIVEN not in repr(secret)
    assert secret.key.hex() not in repr(secret)


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("short", 0o600, "has 5 bytes, expected 16 to 4096"),
        (GIVEN, 0o644, "has mode 0644"),
    ],
)
def test_file_with_a_weak_secret_is_refused(
    tmp_path: Path, text: str, mode: int, expected: str
) -> None:
    path = secret_file(tmp_path, text, mode)

    with pytest.raises(ConfigError, match=f"network.secret_file {path} {expected}") as caught:
        secret_of(tmp_path, file=path)
    assert text not in str(caught.value)


def test_missing_file_and_two_secrets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        secret_of(tmp_path, file=tmp_path / "none")
    with pytest.raises(ConfigError, match="EPLB_SECRET"):
        secret_of(tmp_path, {"EPLB_SECRET": GIVEN}, file=secret_file(tmp_path, GIVEN))


def test_address_of_another_host_without_a_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology.hosts\[1\] is 10\.0\.0\.1"):
        secret_of(tmp_path)
    assert not (tmp_path / "state").exists()


def test_loopback_alone_makes_one_secret_for_all_processes_of_the_host(tmp_path: Path) -> None:
    addresses = {"topology.hosts[0]": "127.0.0.1", "http.host": "127.0.0.2"}
    first, second = (secret_of(tmp_path, addresses=addresses) for _ in range(2))
    path = tmp_path / "state" / "secret"

    assert first == second
    assert not first.is_given
    assert first.http_token is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["secret"]


def test_token_file_is_for_its_owner_and_holds_no_secret(tmp_path: Path) -> None:
    secret = secret_of(tmp_path, {"EPLB_SECRET": GIVEN})

    path = write_token(secret.http_token, tmp_path / "http-token")

    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == f"{secret.http_token}\n"
    assert GIVEN.encode().hex() not in path.read_text()
