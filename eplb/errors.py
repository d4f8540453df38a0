"""The exceptions of this project, as one tree.

    EplbError
    ├── ConfigError       an invalid setting, flag or name
    │   └── UnfitSetting  a field of a component that is out of range, or does not fit the others
    ├── PlacementError    a placement that must not serve
    ├── TopologyError     ranks, slots or nodes that contradict each other
    ├── HistoryError      load that cannot be planned on
    ├── MigrationError    moves that cannot be made, or that failed
    ├── CheckpointError   weights on disk that are missing, damaged or of another shape
    ├── StoreError        the load store cannot be used
    │   ├── StaleGeneration   another placement was committed since the caller read it
    │   └── FencedOut         another controller holds the lease now
    └── RankError         a rank died, fell out of step, or missed a deadline
        └── BrokenGroup   a peer is dead or late: all ranks stop serving and may start again

Each message gives the place, what was found and what was expected. Broken invariants of this code
are ``assert``s, not these.
"""

ABSENT = 75  # exit status EX_TEMPFAIL of sysexits.h: a peer, a host cache or the store may come


def shown(value: object) -> str:
    """A value as messages show it."""
    return repr(value) if isinstance(value, str) else str(value)


def reason_of(exc: Exception) -> str:
    """What failed, in one sentence: an error of this project as it is, another with its type."""
    return str(exc) if isinstance(exc, EplbError) else f"{type(exc).__name__}: {exc}"


def counted(number: int, noun: str, verb: str = "") -> str:
    """A number with its noun, and a verb: ``1 rank serves``, ``2 ranks serve``."""
    is_one = number == 1
    found = f"{number:,} {noun}" if is_one else f"{number:,} {noun}s"
    return f"{found} {verb}{'s' * is_one}" if verb else found


class EplbError(Exception):
    """Root of the tree: catch this to catch every error that this project raises on purpose."""

    # Status with which a rank that cannot start exits. `eplb launch` starts it again unless the
    # status is 2: a setting, a file or the engine's code has to change first. A status of ABSENT
    # does not count as a death.
    rank_exit_status = 2


class ConfigError(EplbError, ValueError):
    """An invalid setting, flag or name."""


class UnfitSetting(ConfigError):
    """A field of a component that is out of its range, or does not fit the others.

    Who has read the value from a file adds the place (``eplb/settings``).
    """

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(name, found, expected)
        self.name, self.found, self.expected = name, found, expected

    def __str__(self) -> str:
        return f"{self.name} is {shown(self.found)}, expected {self.expected}"


class PlacementError(EplbError, ValueError):
    """A placement that must not serve."""


class TopologyError(EplbError, ValueError):
    """Ranks, slots or nodes that contradict each other."""


class HistoryError(EplbError, ValueError):
    """Load that cannot be planned on."""


class MigrationError(EplbError):
    """Moves that cannot be made, or that failed."""

    rank_exit_status = ABSENT


class CheckpointError(EplbError):
    """Weights on disk that are missing, damaged or of another shape."""


class StoreError(EplbError):
    """The load store cannot be used."""

    rank_exit_status = ABSENT


class StaleGeneration(StoreError):
    """Another placement was committed since the caller read it; read it and decide again."""


class StaleRevision(StoreError):
    """Live settings were changed since the caller read them; read again and decide again."""


class FencedOut(StoreError):
    """Another controller holds the lease now; the caller must stop acting as the controller."""


class RankError(EplbError):
    """A rank died, fell out of step, or missed a deadline."""

    rank_exit_status = ABSENT


class BrokenGroup(RankError):
    """A peer is dead or late: no rank may run another step, and all ranks may be started again.

    The rank that raises it is not the cause. It agrees with the other survivors before it exits.
    """


class GroupChanges(BrokenGroup):
    """The group ends between two passes, as planned: the next one is formed, and no peer is dead.

    An engine handles it as it handles a death.
    """
