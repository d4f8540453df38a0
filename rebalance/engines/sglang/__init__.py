"""Plug-in for SGLang: its loads into our store, our plans into its live placement.

    forward pass -> recorder -> LoadTap -> (round) -> StoreProcess -> store_link: store, Planner
                                              ^                              |
                       map of every rank <- Rounds <------- a plan ----------+

The forward thread counts, takes part in one small reduction every ``telemetry.window_steps``
passes, and moves weights with the engine's own updater. It never waits for a store or a planner;
for a record of the host cache only where the updater has left a slot wrong. SGLang loads it by the
entry point ``sglang.srt.plugins``: ``rebalance.engines.sglang.entry:register``.

Words of the engine: "physical expert" is a slot, "logical expert" an expert. Its layer axis has all
hidden layers; rows of dense layers stay as they are.
"""
