"""The rebalancer: a rank, the controller, and how experts move between them.

Names are imported when they are first used, and torch with those of the rank.
"""

from typing import TYPE_CHECKING

from eplb.packages import check_packages, lazy_exports

if TYPE_CHECKING:
    from rebalance.controller.loop import Controller, ControllerSettings
    from rebalance.rank.group import Group
    from rebalance.rank.rank import Rank
    from rebalance.stage.stage_settings import LinkBudget, StageSettings

__all__ = [
    "Controller",
    "ControllerSettings",
    "Group",
    "LinkBudget",
    "Rank",
    "StageSettings",
]

_EXPORTS = {
    "rebalance.controller.loop": "Controller ControllerSettings",
    "rebalance.rank.group": "Group",
    "rebalance.rank.rank": "Rank",
    "rebalance.stage.stage_settings": "LinkBudget StageSettings",
}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

check_packages(("runtime", "telemetry"))
