"""Plug-in for SGLang: its loads into our store, our plans into its live placement.

    forward pass -> recorder -> LoadTap -> (round) -> StoreProcess -> store
                                              ^            |
                       map of every rank <- Rounds <- planner process

The forward thread counts, takes part in one small reduction every ``telemetry.window_steps``
passes, and moves weights with the engine's own updater. It never waits for a store, a disk or a
planner. For the entry point ``sglang.srt.plugins``, as ``rebalance.engines.sglang.entry:register``:
not registered until the contract tests pass.

Words of the engine: "physical expert" is a slot, "logical expert" an expert. Its layer axis has all
hidden layers; rows of dense layers stay as they are.
"""
