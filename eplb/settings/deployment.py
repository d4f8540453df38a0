"""What every process of a deployment knows of it: its name, its store and its load windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from eplb.declared import Setting, check_fields
from eplb.errors import UnfitSetting

DEPLOYMENT = "demo"  # the name of a deployment that is given none
STORE_FILE = "store.sqlite"  # file in the state folder if no store is named


@dataclass(frozen=True)
class DeploymentSettings:
    """Where a deployment keeps what is its own."""

    name: Annotated[
        str,
        Setting(
            "name in the store and on the hosts",
            short="deployment_name",
            min_length=1,
            max_length=64,
        ),
    ] = DEPLOYMENT
    state_dir: Annotated[Path, Setting("folder of the store, the weights and the journals")] = Path(
        ".eplb"
    )
    store: Annotated[
        str, Setting("URL of the load store; empty: a file in the state folder", secret=True)
    ] = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.store == "memory:":
            raise UnfitSetting("store", self.store, "a store that several processes can share")

    @property
    def store_url(self) -> str:
        """URL or file of the store; may hold a password."""
        return self.store or str(self.state_dir / STORE_FILE)


@dataclass(frozen=True)
class WindowSettings:
    """Load windows, in steps of the engine."""

    window_steps: Annotated[
        int,
        Setting(
            "forward passes in a load window; the demo: as many as 16,384 tokens of all ranks take",
            at_least=1,
        ),
    ] = 64
    sample_steps: Annotated[
        int,
        Setting(
            "forward passes in a sample, a divisor of window_steps; the demo: a quarter of them",
            at_least=1,
        ),
    ] = 16
    window_seconds: Annotated[
        float,
        Setting(
            "length of a load window; 0: window_steps",
            unit="s",
            at_most=3600,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window_steps % self.sample_steps:
            expected = f"a divisor of telemetry.window_steps, {self.window_steps}"
            raise UnfitSetting("sample_steps", self.sample_steps, expected)
