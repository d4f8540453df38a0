"""What comes in over HTTP. A key that nobody knows is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Reason = Annotated[str, Field(min_length=1, max_length=500, description="kept with the change")]


class Body(BaseModel):
    """A request body: what is not named here is refused."""

    model_config = ConfigDict(extra="forbid")


class RebalanceRequest(Body):
    """Ask the controller for a plan now, and unless this is a dry run, for its migration."""

    reason: Reason
    dry_run: bool = Field(True, description="true: plan only, move nothing")
    policy: str | None = Field(None, min_length=1, description="none: the controller's own")


class ExplainRequest(Body):
    """Ask the controller why a plan made now would have an expert where it has it."""

    layer: int = Field(ge=0, description="as the placement counts, from 0")
    expert: int = Field(ge=0, description="a logical expert")
    policy: str | None = Field(None, min_length=1, description="none: the controller's own")


class ReasonRequest(Body):
    """Pause or resume."""

    reason: Reason


class ControlRequest(Body):
    """Change switches; those that are not given stay."""

    reason: Reason
    movement: bool | None = Field(None, description="the kill switch: false stops all movement")
    observe: bool | None = Field(None, description="true: plan and report, publish nothing")
