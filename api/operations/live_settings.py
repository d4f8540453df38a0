"""Live settings over HTTP: what applies, from which source, and changes at a revision.

The revision is the entity tag of the settings. A change names the one that it has read in
``If-Match``, so that of two clients that change the same settings one is refused (RFC 9110, 13.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from api.config.live import LiveSetting, live_settings, settings_in
from api.http.arguments import Policy, Reason
from api.http.dependencies import (
    KnownRevision,
    Live,
    Service,
    admin,
    audited,
    changing,
    reading,
    tag_with,
)
from api.http.document import refused_with
from api.http.problems import ProblemType, Refused
from eplb.declared import Meaning
from telemetry.state.live import LiveState


@dataclass(frozen=True)
class LiveAnswer:
    """Entries of a live setting that is a list; the revision is also the entity tag."""

    revision: Annotated[int, Meaning("revision of the live settings, of which these are one")]
    unmet: Annotated[list[str], Meaning("reasons why plans of the current run leave an entry out")]
    time: Annotated[
        float | None, Meaning("time of the latest change; null: the configuration applies")
    ]
    reason: str | None


@dataclass(frozen=True)
class SettingsAnswer:
    """Every live setting; the revision is the entity tag too."""

    revision: int
    settings: list[LiveSetting]


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a whole number")
    return value


# In a JSON document 1.0 is an integer; "1" and true are not. Field comes before the validator, or
# the OpenAPI document would lack the bounds.
WHOLE = (Field(strict=False), BeforeValidator(_number))


def _fields() -> dict[str, Any]:
    """The live settings as fields of a body; null: the static value applies again."""
    found: dict[str, Any] = {}
    for name, known in live_settings().items():
        whole = WHOLE if known.kind is int else ()
        of_type: Any = Annotated[known.kind, known.about, *whole]
        meaning = f"{known.about.text}; null: the static value"
        # The names of policies are documented; ``change_settings`` checks them.
        of_name = Policy if name == "policy" else of_type | None
        found[name] = (of_name, Field(None, description=meaning))
    return found


class _SettingsBody(BaseModel):
    """Change live settings; those that are not named stay."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"anyOf": [{"required": [name]} for name in live_settings()]},
    )

    reason: Reason


SettingsRequest: type[_SettingsBody] = create_model(
    "SettingsRequest", __base__=_SettingsBody, __doc__=_SettingsBody.__doc__, **_fields()
)


def settings_answer(state: LiveState) -> SettingsAnswer:
    """Give every live setting with its source."""
    return SettingsAnswer(revision=state.revision, settings=settings_in(state))


def reason_of(body: _SettingsBody) -> str:
    """Why settings change; the type of the body is made at its import."""
    return body.reason


def changes_in(body: _SettingsBody) -> dict[str, Any]:
    """Give the live settings that a body names, checked.

    Raises:
        Refused: no setting was named.
        ConfigError: an unknown policy, or a list of figures that cannot be read.
    """
    changes = {name: getattr(body, name) for name in body.model_fields_set - {"reason"}}
    if not changes:
        raise Refused(
            ProblemType.INVALID_REQUEST,
            "the body names no setting, expected one or more beside the reason",
        )
    for name, value in changes.items():
        if value is not None and (check := live_settings()[name].about.check) is not None:
            check(value)
    return changes


reads, acts = reading(), changing(admin, audited)


@reads.get("/settings")
def settings(service: Service, response: Response) -> SettingsAnswer:
    """Live settings. Each value, its source and its revision; the `ETag` is for `PATCH`."""
    state = service.store.live()
    tag_with(response, state.revision)
    return settings_answer(state)


@acts.patch(
    "/settings",
    responses=refused_with(ProblemType.SETTINGS_CHANGED, ProblemType.PRECONDITION_REQUIRED),
)
def change_settings(live: Live, revision: KnownRevision, body: SettingsRequest) -> SettingsAnswer:  # type: ignore[valid-type]
    """Change live settings. At the revision in `If-Match`. Those that are not named stay; null
    removes a live value.
    """
    changes = changes_in(body)
    return settings_answer(live.make(changes, expected=revision, reason=reason_of(body)))
