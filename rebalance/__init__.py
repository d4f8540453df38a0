"""The rebalancer: a rank's agent, the controller, and how experts move between them.

Names are imported when they are first used, and torch with those of the rank.
"""

from typing import TYPE_CHECKING

from eplb.packages import check_packages, lazy_exports

if TYPE_CHECKING:
    from rebalance.agent import RankAgent
    from rebalance.controller.loop import Controller, ControllerSettings
    from rebalance.rank.parts import AgentSettings, Links
    from rebalance.stage.stage_settings import LinkBudget, StageSettings

__all__ = [
    "AgentSettings",
    "Controller",
    "ControllerSettings",
    "LinkBudget",
    "Links",
    "RankAgent",
    "StageSettings",
]

_EXPORTS = {
    "rebalance.agent": "RankAgent",
    "rebalance.controller.loop": "Controller ControllerSettings",
    "rebalance.rank.parts": "AgentSettings Links",
    "rebalance.stage.stage_settings": "LinkBudget StageSettings",
}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

check_packages(("runtime", "telemetry"))
