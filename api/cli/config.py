"""``eplb config``: the effective settings, and the reference page."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from api.access.audit import changed, local_actor, noting
from api.cli.options import ConfiguredDeployment, ConfiguredStore, with_options
from api.cli.store_place import audit_folder, configured_store, open_existing
from api.config.live import live_page, parsed_changes
from api.config.reference import effective, reference_page
from api.config.tree import Settings, load
from api.demo.state_dir import SETTINGS_FILE
from api.terminal.printable import printable
from eplb.errors import ConfigError
from eplb.settings.loader import CONFIG_VARIABLE


@dataclass(frozen=True)
class Configured:
    """The configuration of a command, as its options name it."""

    config: Annotated[Path | None, typer.Option(help="A TOML file; else EPLB_CONFIG names it.")] = (
        None
    )
    setting: Annotated[list[str] | None, typer.Option(help="Any setting: NAME=VALUE.")] = None
    profile: Annotated[
        str | None, typer.Option(help="Profile of the file, such as prefill; else EPLB_PROFILE.")
    ] = None

    @property
    def is_named(self) -> bool:
        """Whether any of the options is given."""
        return self.config is not None or bool(self.setting) or self.profile is not None

    def settings(self) -> Settings:
        """Read the configuration.

        Raises:
            ConfigError: it cannot be used.
        """
        named = named_settings(self.setting or [])
        environ = os.environ
        return load({}, config=self.config, environ=environ, named=named, profile=self.profile)


@with_options
def config(
    configured: Configured,
    reference: Annotated[bool, typer.Option(help="Print the reference page instead.")] = False,
    live: Annotated[bool, typer.Option(help="Print the live settings in the store.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A live setting: NAME=VALUE.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="A live setting; its static value applies again.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason; stored with the change.")] = (
        "changed from the command line"
    ),
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
) -> None:
    """Print every setting and where its value comes from; passwords are masked.

    With --live: what applies to a deployment, by its store; --set and --unset change it first.
    """
    if reference:
        typer.echo(reference_page(), nl=False)
        return
    changes = _live_changes(live, set_ or [], unset or [])
    if live and store is not None and deployment is not None:
        _print_live(store, deployment, audit_folder(store), changes, reason)
        return
    settings = configured.settings()
    if live:
        url, name = configured_store(store, deployment, settings)
        folder = settings.deployment.state_dir if configured.profile else audit_folder(url)
        _print_live(url, name, folder, changes, reason)
        return
    typer.echo(effective(settings), nl=False)
    of_demo = settings.deployment.state_dir / SETTINGS_FILE
    if not (configured.is_named or CONFIG_VARIABLE in os.environ) and of_demo.is_file():
        note = f"note: a demo ran in this folder by other settings: eplb config --config {of_demo}"
        typer.echo(printable(note), err=True)


def _live_changes(live: bool, pairs: list[str], unset: list[str]) -> dict[str, str | None]:
    if not live and (pairs or unset):
        raise ConfigError("--set and --unset change live settings, expected --live beside them")
    removed = dict.fromkeys(name.replace("-", "_") for name in unset)
    return named_settings(pairs, "--set") | removed


def _print_live(
    url: str, deployment: str, audit: Path, texts: dict[str, str | None], reason: str
) -> None:
    # One that never ran is refused: a misspelt name must not pass for one without settings.
    with closing(open_existing(url, deployment)) as store:
        state = store.live()
        if texts:
            changes = parsed_changes(texts)
            live = {name: value for name, value in changes.items() if value is not None}
            given = changed(changes, state.effective, {**state.static, **live})
            # Before it is done: a change that the audit cannot hold is not made.
            with noting(audit, deployment, f"config --live {given}", reason):
                state = store.change_live(
                    changes, expected=state.revision, reason=reason, by=local_actor()
                )
        typer.echo(live_page(deployment, state), nl=False)


def named_settings(pairs: list[str], flag: str = "--setting") -> dict[str, Any]:
    """Read NAME=VALUE pairs; the settings check names and values.

    Raises:
        ConfigError: a pair without "=", or two pairs with one name.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{flag} is {name!r}, expected NAME=VALUE")
        key = name.replace("-", "_")
        if key in values:
            raise ConfigError(
                f"{flag} {key} is given twice, as {values[key]!r} and {value!r}, expected once"
            )
        values[key] = value
    return values
