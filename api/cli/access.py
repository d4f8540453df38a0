"""``eplb keys`` and ``eplb audit``: access keys, and who changed what and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from api.access.audit import START, Audit, BrokenChain, local_actor, noting
from api.access.keys import AccessKeys
from api.cli.config import Configured
from api.cli.options import AsJson, with_options
from api.terminal.printable import printable
from api.terminal.printing import at

keys = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the key: who has it.")]
Reason = Annotated[str, typer.Option(help="Reason; stored in the audit.")]


def _place(configured: Configured) -> tuple[Path, str]:
    deployment = configured.settings().deployment
    return deployment.state_dir, deployment.name


@keys.command("add")
@with_options
def add_key(
    configured: Configured,
    name: Name,
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")] = "viewer",
    reason: Reason = "added from the command line",
    force: Annotated[bool, typer.Option("--force", help="Also while no admin has a key.")] = False,
) -> None:
    """Add a key and print it, once: the file has its salted hash alone.

    The first key closes a service that was open to every user of this host, page and commands
    included, and is an admin's.
    """
    state_dir, deployment = _place(configured)
    kept = AccessKeys(state_dir)
    is_first = not kept.exists
    with noting(state_dir, deployment, f"keys add {name[:100]} {role[:20]}", reason):
        key = kept.add(name, role, force=force)
    typer.echo(key)
    typer.echo(f"eplb: {name} is {role}, by {local_actor()}; the key is not shown again", err=True)
    if is_first:
        typer.echo(
            "eplb: from now on page, REST API and `--service` ask for a key or the deployment's "
            "token (EPLB_KEY); to open the service again, remove " + str(kept.path),
            err=True,
        )


@keys.command("remove")
@with_options
def remove_key(
    configured: Configured,
    name: Name,
    reason: Reason = "removed from the command line",
) -> None:
    """Remove a key; the next request with it is refused. The last key of an admin stays."""
    state_dir, deployment = _place(configured)
    with noting(state_dir, deployment, f"keys remove {name[:100]}", reason):
        AccessKeys(state_dir).remove(name)
    typer.echo(f"{name} is removed, by {local_actor()}: {printable(reason)}")


@keys.command("list")
@with_options
def list_keys(
    configured: Configured,
    json_output: AsJson = False,
) -> None:
    """List names and roles."""
    state_dir, _ = _place(configured)
    found = AccessKeys(state_dir).all()
    if json_output:
        shown = [{"name": one.name, "role": one.role, "created": one.created} for one in found]
        typer.echo(json.dumps(shown, indent=1))
        return
    if not found:
        typer.echo("no keys")
    for one in found:
        typer.echo(f"{one.name:<24}{one.role:<10}{at(one.created)}")


@with_options
def audit(
    configured: Configured,
    last: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="How many lines, the latest.")
    ] = 20,
    verify: Annotated[bool, typer.Option("--verify", help="Follow the chain of hashes.")] = False,
    expect: Annotated[
        str | None, typer.Option(help="With --verify: NUMBER:HASH of a line noted earlier.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Show who changed what, when and why; or verify that no line was changed.

    Lines that were cut off at the end leave a chain that holds: keep NUMBER:HASH, which --verify
    prints, at another place, and give it as --expect later. Exit status 1: the chain is broken.
    """
    kept = Audit(_place(configured)[0])
    if verify:
        _verify(kept, expect)
        return
    found = kept.page(None, last)
    if json_output:
        typer.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    if not found:
        typer.echo("the audit has no lines")
    for one in reversed(found):
        why = f" ({one.detail})" if one.detail else ""
        why += f": {one.reason}" if one.reason else ""
        line = f"{at(one.time)} {one.deployment} {one.actor} ({one.role}) from {one.address}"
        typer.echo(printable(f"{line} {one.action} {one.outcome}{why}"))


def _verify(kept: Audit, expect: str | None) -> None:
    last = kept.verify()
    number, mark = (0, START) if last is None else (last.number, last.hash)
    if expect is not None:
        wanted, _, noted = expect.partition(":")
        hashes = {str(one.number): one.hash for one in kept.entries()} | {"0": START}
        if hashes.get(wanted) != noted:
            found = hashes.get(wanted, "no such line")
            raise BrokenChain(f"line {wanted} has the hash {found}, expected {noted}")
    typer.echo(f"{number} lines, the chain holds; the last is {number}:{mark}")
