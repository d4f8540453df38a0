"""The policy table and its entries: greedy, incremental, exact, baselines."""
