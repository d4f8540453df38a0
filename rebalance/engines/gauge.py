"""The gauge's old place, for the mover of vLLM; it moves to ``common`` with the records."""

from rebalance.engines.common.gauge import set_part as set_part
from rebalance.engines.common.gauge import value_of as value_of
