"""SGLang's record endpoints: starts recording and asks for a dump, which the engine writes itself.

The answer names no file: the folder that the engine writes into is watched. Two kinds of engines
are refused before anything is asked of them. A dump empties the recorder, and the balancer of an
engine with ``--enable-eplb`` counts with the same one. An engine without the flag
``--expert-distribution-recorder-mode`` has no recorder, and its scheduler does not catch the
exception that a request then raises.

Source: the wheel of sglang 0.5.23: ``srt/entrypoints/http_server.py``, ``srt/server_args.py``,
``srt/managers/scheduler.py`` and ``srt/eplb/expert_distribution.py``. Not run against an engine.
"""

from __future__ import annotations

import http.client
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from eplb.core.bounded_json import decode_json
from eplb.errors import ConfigError

TIMEOUT_S = 30.0
MOST_BYTES = 4 * 2**20
INFO = ("/server_info", "/get_server_info")  # newer releases, older ones
BALANCER, MODE = "enable_eplb", "expert_distribution_recorder_mode"


class EngineRecorder:
    """The recorder of one engine.

    Args:
        url: of the engine's HTTP server.
        key: its API key; "": it has none.

    Raises:
        ConfigError: no HTTP address.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise ConfigError(f"{url}: {exc}, expected http://HOST:PORT") from exc
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url} is no HTTP address, expected http://HOST:PORT")
        self._url, self._host, self._port = url, host, port
        self._is_tls = parts.scheme == "https"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def start(self) -> None:
        """Start recording.

        Raises:
            ConfigError: the engine does not answer, it has no recorder, or its own balancer uses
                the recorder.
        """
        balancer, mode = self._flags()
        if balancer:
            raise ConfigError(
                f"{self._url} serves with --enable-eplb, and a dump would empty the counters that "
                "it plans on: expected an engine without it, or its store (docs/engines.md)"
            )
        if not mode:
            raise ConfigError(
                f"{self._url} serves without --expert-distribution-recorder-mode, and a request to "
                "record would end its scheduler: expected the mode stat"
            )
        self._ask("POST", "/start_expert_distribution_record")

    def dump(self) -> None:
        """Ask the engine to write what it has counted.

        Raises:
            ConfigError: the engine does not answer.
        """
        self._ask("POST", "/dump_expert_distribution_record")

    def stop(self) -> None:
        """Stop recording.

        Raises:
            ConfigError: the engine does not answer.
        """
        self._ask("POST", "/stop_expert_distribution_record")

    def _flags(self) -> tuple[bool, str]:
        """Whether its own balancer is on, and the mode of its recorder; "": it has none."""
        errors = []
        for path in INFO:
            try:
                found = decode_json(self._ask("GET", path), max_bytes=MOST_BYTES)
            except (ConfigError, ValueError) as exc:
                errors.append(str(exc))
                continue
            if isinstance(found, dict) and found.keys() >= {BALANCER, MODE}:
                return bool(found[BALANCER]), str(found[MODE] or "")
            errors.append(f"{path} lacks {BALANCER} or {MODE}")
        raise ConfigError(f"{self._url} does not tell how it records: {errors[0]}")

    def _ask(self, method: str, path: str) -> bytes:
        kind: Any = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        try:
            with closing(kind(self._host, self._port, timeout=TIMEOUT_S)) as connection:
                connection.request(method, path, headers=self._headers)
                answer = connection.getresponse()
                body: bytes = answer.read(MOST_BYTES)
        except (OSError, http.client.HTTPException) as exc:
            raise ConfigError(f"{self._url}{path} cannot be reached: {exc}") from exc
        if answer.status != http.client.OK:
            raise ConfigError(f"{self._url}{path} answered {answer.status}, expected 200")
        return body
