"""Shadow mode: decisions of this planner beside those of an engine, priced on the same windows."""
