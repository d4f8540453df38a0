"""Each assumption about an engine is compared with the wheel: one that does not hold is named."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebalance.engines.common.guards import Assumptions, refusals
from tests.support.engines.installed import engine

ASSUMED = engine.ASSUMED
AS_READ = f"expected as in {ASSUMED.package} {ASSUMED.release}"


def changed() -> Iterator[tuple[str, Assumptions, str]]:
    """For every assumption: its name, the assumption with one change, and what is refused."""

    def alone(name: str, refusal: str, **assumed: object) -> tuple[str, Assumptions, str]:
        made = Assumptions(ASSUMED.package, ASSUMED.release, **assumed)  # type: ignore[arg-type]
        return name, made, refusal

    for path, names in ASSUMED.signatures.items():
        refusal = f"{path} takes ({names}), expected ({names} further) as in {ASSUMED.package}"
        yield alone(path, refusal, signatures={path: f"{names} further"})
        gone = f"{path}_gone"
        yield alone(gone, f"{gone} does not exist, {AS_READ}", signatures={gone: names})
    for kind, of_kind in (("lines", ASSUMED.lines), ("files", ASSUMED.files)):
        for place, lines in of_kind.items():
            name = place.name if isinstance(place, Path) else place
            for line in lines:
                other = f"{line[:3]}x{line[3:]}"
                refusal = f"{name} lacks {other!r}, {AS_READ}"
                yield alone(f"{name} {line}", refusal, **{kind: {place: (other,)}})
    for path, names in ASSUMED.fields.items():
        for name in names.split():
            refusal = f"{path} has no field {name}_gone, {AS_READ}"
            yield alone(f"{path} {name}", refusal, fields={path: f"{name}_gone"})
    for path in ASSUMED.digests:
        refusal = f"{path} has another source, expected {'0' * 16} as in {ASSUMED.package}"
        yield alone(f"{path} digest", refusal, digests={path: "0" * 16})


@pytest.mark.parametrize(
    ("assumed", "refusal"), [pytest.param(*one, id=name) for name, *one in changed()]
)
def test_assumption_that_does_not_hold_is_refused(assumed: Assumptions, refusal: str) -> None:
    (found,) = refusals(assumed)

    assert found.startswith(refusal)


def test_released_wheel_passes_every_check() -> None:
    assert list(engine.refusals()) == []


@pytest.mark.parametrize("version", ["0.0.1", "1.0.0"])
def test_other_release_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    first, *_ = engine.refusals()

    assert first.startswith(f"{ASSUMED.package} is {version}, expected {ASSUMED.release}")
