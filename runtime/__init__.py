"""What a serving process runs: routing, dispatch, expert memory, the MoE layer, the reference.

Names are imported when they are first used, and torch with them.
"""

from typing import TYPE_CHECKING

from eplb.packages import lazy_exports

if TYPE_CHECKING:
    from runtime.checkpoints.checkpoint import Checkpoint
    from runtime.checkpoints.own_model import write_random_checkpoint
    from runtime.counters import SlotCounter
    from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
    from runtime.experts import ExpertBank, ExpertSchema, PlainArena
    from runtime.model.moe import MoELayer, MoEStack
    from runtime.model.reference import ReferenceModel
    from runtime.routing import RoutingTable

__all__ = [
    "AllToAllDispatcher",
    "Checkpoint",
    "Dispatcher",
    "ExpertBank",
    "ExpertSchema",
    "MoELayer",
    "MoEStack",
    "PlainArena",
    "ReferenceModel",
    "RoutingTable",
    "SlotCounter",
    "write_random_checkpoint",
]

_EXPORTS = {
    "runtime.checkpoints.checkpoint": "Checkpoint",
    "runtime.checkpoints.own_model": "write_random_checkpoint",
    "runtime.counters": "SlotCounter",
    "runtime.dispatch.all_to_all": "AllToAllDispatcher Dispatcher",
    "runtime.experts": "ExpertBank ExpertSchema PlainArena",
    "runtime.model.moe": "MoELayer MoEStack",
    "runtime.model.reference": "ReferenceModel",
    "runtime.routing": "RoutingTable",
}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
