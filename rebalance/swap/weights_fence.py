"""The weights-version fence: nothing of old weights is ever swapped in over new ones.

    agent.begin_update(version=7)          # on every rank, between the same two steps
    for layer, slot, expert in agent.held():  # by the placement that serves, not the first one
        load(layer, expert, into=bank.live(layer, slot))
    agent.end_update()

vLLM issue 55228 shows two failures: weights reloaded by the first placement after experts have
moved, and a staged buffer of old weights written over the new ones. Here the engine reads from
``held`` what each slot holds, a running migration is dropped by vote before the first byte is
written, every migration names its weights version, and ranks vote with the version.
"""

from __future__ import annotations

from eplb.errors import ConfigError


class Fence:
    """Which weights a rank serves, and whether they are being replaced."""

    def __init__(self) -> None:
        self.version = 0
        self.next_version: int | None = None  # while an update is under way

    @property
    def is_open(self) -> bool:
        """Return whether steps may run and plans may be adopted."""
        return self.next_version is None

    @property
    def ballot(self) -> int:
        """The version in this rank's ballots: negative while its weights are being replaced.

        If not all ranks update at once, the versions differ, and every rank detects the
        disagreement.
        """
        return self.version if self.next_version is None else -self.next_version

    def begin(self, version: int) -> None:
        """Start to replace the weights.

        Raises:
            ConfigError: an update is under way, or versions do not grow.
        """
        if self.next_version is not None:
            raise ConfigError(
                f"an update to weights version {self.next_version} is under way, expected it to "
                f"end before one to version {version} begins"
            )
        if version <= self.version:
            raise ConfigError(
                f"weights version {version} follows {self.version}, expected a greater one"
            )
        self.next_version = version

    def end(self) -> None:
        """Serve the new weights."""
        assert self.next_version is not None, "only an update that began can end"
        self.version, self.next_version = self.next_version, None
