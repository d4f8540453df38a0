"""From alternatives to a decision: the net-benefit gate, the budget, the plan."""
