"""``eplb support-bundle``: the files that a bug report needs, in one archive without secrets.

manifest.json   files in the bundle, files that were truncated, missing files with the reason
versions.json   of this program, Python, the system and the packages
settings.toml   of a demo: effective settings of its last start, as ``eplb config`` prints them;
                other deployments keep no such file
state/*.json    overview, serving placement, last placements, last plan, live settings, lease
events.jsonl    the last events of the store
journal/*       the last part of each rank's journal
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from api.cli.options import ConfiguredDeployment, ConfiguredStore
from api.cli.store_place import open_existing
from api.config.tree import load
from api.demo.state_dir import SETTINGS_FILE
from api.http.placement_answers import line_of
from api.http.service import AdminService
from api.operations import watching
from api.operations.placements import placement_answer
from api.operations.table import answer_in_process
from eplb import __version__
from eplb.errors import ConfigError, EplbError, counted
from eplb.settings.deployment import DeploymentSettings
from rebalance.protocol.journal import JOURNAL_FOLDER
from telemetry.state.store import StateStore

MB = 1_000_000
LAST_EVENTS, LAST_PLACEMENTS = 10_000, 100
PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "ortools",
    "torch",
    "pydantic",
    "fastapi",
    "uvicorn",
    "redis",
)

# Passwords of URLs, and values after the name of a secret.
_SECRETS = (
    re.compile(r"(://[^\s\"'/:@]*):[^\s\"']*@"),
    re.compile(r"((?:password|passwd|secret)\\?[\"']?\s*[=:]\s*\\?[\"']?)[^\s\"'\\,&}\]]+", re.I),
)
_MASKED = (r"\1:***@", r"\1***")


def support_bundle(
    out: Annotated[Path, typer.Argument(help="A new file, OUT.tar.gz.")],
    state_dir: Annotated[
        Path | None, typer.Option(help="The state folder; else that of the configuration.")
    ] = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    max_mb: Annotated[
        int, typer.Option(min=1, max=10_000, help="Most megabytes, before compression.")
    ] = 64,
) -> None:
    """Collect state, journals, settings without secrets, versions and the last events."""
    given = {"state_dir": state_dir, "store": store, "deployment_name": deployment}
    settings = load(given, config=None, environ=os.environ).deployment
    bundle = collect(settings, max_mb * MB)
    write(out, bundle)
    typer.echo(
        f"{out}: {counted(len(bundle.members), 'file')}, {bundle.num_bytes:,} bytes uncompressed"
    )
    for name, reason in bundle.missing.items():
        typer.echo(f"missing: {name}: {reason}")


class Bundle:
    """Files of a bundle, within a budget of bytes; files that are added first have priority."""

    def __init__(self, max_bytes: int) -> None:
        self.room = max_bytes  # bytes that may still be added
        self.members: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}  # bytes that were left out, from the beginning
        self.missing: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.members.values()))

    def add(self, name: str, text: str) -> None:
        """Add a file that must not be truncated."""
        content = without_secrets(text).encode()
        if len(content) > self.room:
            self.missing[name] = f"{len(content)} bytes, expected at most {self.room} (--max-mb)"
            return
        self._take(name, content)

    def add_end(self, name: str, lines: bytes, most: int, num_cut: int = 0) -> None:
        """Add the last lines that fit into ``most`` bytes; ``num_cut`` bytes were cut already."""
        content = without_secrets(lines.decode("utf-8", "replace")).encode()
        kept = content
        if num_cut or len(content) > most:
            kept = content[max(0, len(content) - most) :]
            kept = kept[kept.find(b"\n") + 1 :]
            self.cut[name] = num_cut + len(content) - len(kept)
        self._take(name, kept)

    def add_end_of(self, name: str, path: Path, most: int) -> None:
        """Add the last lines of a file, which may be growing."""
        try:
            with path.open("rb") as file:
                num_cut = max(0, file.seek(0, io.SEEK_END) - most)
                file.seek(num_cut)
                self.add_end(name, file.read(most), most, num_cut)
        except OSError as exc:
            self.missing[name] = str(exc)

    def try_to(self, name: str, make: Callable[[], str]) -> None:
        """Add a file whose content may not be available."""
        try:
            self.add(name, make())
        except (EplbError, OSError) as exc:
            self.missing[name] = without_secrets(str(exc))

    def _take(self, name: str, content: bytes) -> None:
        self.members[name] = content
        self.room -= len(content)


def collect(settings: DeploymentSettings, max_bytes: int) -> Bundle:
    """Collect a bundle.

    Raises:
        ConfigError: there is no such folder.
    """
    state_dir = settings.state_dir
    if not state_dir.is_dir():
        raise ConfigError(
            f"there is no folder {state_dir}, expected the state folder (--state-dir)"
        )
    bundle = Bundle(max_bytes)
    bundle.add("versions.json", _json(versions()))
    effective = state_dir / SETTINGS_FILE
    bundle.try_to("settings.toml", lambda: effective.read_text(encoding="utf-8", errors="replace"))
    try:
        with closing(open_existing(settings.store_url, settings.name)) as opened:
            _add_state(bundle, opened)
    except (EplbError, ImportError) as exc:
        bundle.missing["state"] = without_secrets(str(exc))
    journals = sorted((state_dir / JOURNAL_FOLDER).glob("*"))
    if not journals:
        bundle.missing[JOURNAL_FOLDER] = f"no file in {state_dir / JOURNAL_FOLDER}"
    for number, path in enumerate(journals):
        share = bundle.room // (len(journals) - number)
        bundle.add_end_of(f"{JOURNAL_FOLDER}/{path.name}", path, share)
    return bundle


def _add_state(bundle: Bundle, store: StateStore) -> None:
    service = AdminService(store)

    answers: Mapping[str, Callable[[], Any]] = {
        "overview": lambda: answer_in_process(service, watching.state),
        "heat": lambda: answer_in_process(service, watching.heat),
        "placement": lambda: placement_answer(store, None),
        "placements": lambda: list(map(line_of, store.placements(LAST_PLACEMENTS))),
        "plan": lambda: answer_in_process(service, watching.plan),
        "settings": lambda: asdict(store.live()),
        "lease": lambda: None if (lease := store.lease()) is None else asdict(lease),
    }
    for name, answer in answers.items():
        bundle.try_to(f"state/{name}.json", lambda answer=answer: _json(answer()))  # type: ignore[misc]
    events = reversed(store.latest_events(limit=LAST_EVENTS))
    # Half of the remaining budget: the rest is for journals.
    lines = "".join(json.dumps(asdict(event), default=str) + "\n" for event in events).encode()
    bundle.add_end("events.jsonl", lines, bundle.room // 2)


def write(out: Path, bundle: Bundle) -> None:
    """Write a bundle to a new file: all of it appears, or nothing.

    Raises:
        ConfigError: the file exists already, or cannot be written.
    """
    manifest = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {name: len(content) for name, content in bundle.members.items()},
        "bytes_cut_from_the_beginning": bundle.cut,
        "missing": bundle.missing,
    }
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        if out.exists():
            raise ConfigError(f"{out} exists already, expected a new file")
        with tarfile.open(unfinished, "w:gz") as archive:
            for name, content in {
                "manifest.json": _json(manifest).encode(),
                **bundle.members,
            }.items():
                about = tarfile.TarInfo(name)
                about.size, about.mtime = len(content), int(time.time())
                archive.addfile(about, io.BytesIO(content))
        unfinished.replace(out)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {exc.strerror}") from exc


def versions() -> dict[str, str]:
    """Give the versions of everything that a fault may depend on."""
    found = {"eplb": __version__, "python": sys.version, "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def without_secrets(text: str) -> str:
    """Mask passwords of URLs and values that are named as secrets."""
    for pattern, masked in zip(_SECRETS, _MASKED, strict=True):
        text = pattern.sub(masked, text)
    return text


def _json(answer: Any) -> str:
    return TypeAdapter(Any).dump_json(answer, indent=1, fallback=str).decode() + "\n"
