"""Everything that can go wrong, as one tree.

    EplbError
    ├── ConfigError       a setting, a flag or a name that cannot be used
    ├── PlacementError    a placement that must not serve
    ├── TopologyError     ranks, slots or nodes that do not fit together
    ├── HistoryError      load figures that cannot be planned on
    ├── MigrationError    moves that cannot be made, or were not
    ├── CheckpointError   weights on disk that are missing, damaged or of another shape
    ├── StoreError        the load store cannot be used
    │   ├── StaleGeneration   the placement moved on since the caller looked
    │   └── FencedOut         another controller holds the lease now
    └── RankError         a rank died, fell out of step, or missed a deadline
        └── BrokenGroup   a peer is dead or late: nobody serves on, and all may start again

Each message says where, what was found and what was expected. Our own broken invariants are
``assert``s, not these.
"""


class EplbError(Exception):
    """Root of the tree: catch this to catch every refusal of this project."""


class ConfigError(EplbError, ValueError):
    """A setting, a flag or a name that cannot be used."""


class PlacementError(EplbError, ValueError):
    """A placement that must not serve."""


class TopologyError(EplbError, ValueError):
    """Ranks, slots or nodes that do not fit together."""


class HistoryError(EplbError, ValueError):
    """Load figures that cannot be planned on."""


class MigrationError(EplbError):
    """Moves that cannot be made, or were not."""


class CheckpointError(EplbError):
    """Weights on disk that are missing, damaged or of another shape."""


class StoreError(EplbError):
    """The load store cannot be used."""


class StaleGeneration(StoreError):
    """The placement moved on since the caller looked; look again and decide again."""


class FencedOut(StoreError):
    """Another controller holds the lease now; whoever was the controller must stop acting."""


class RankError(EplbError):
    """A rank died, fell out of step, or missed a deadline."""


class BrokenGroup(RankError):
    """A peer is dead or late: no rank may run another step, and a start of all ranks is right.

    The rank that says so did nothing wrong. It agrees with the other survivors before it ends.
    """
