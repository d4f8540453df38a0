"""From alternatives to a decision: score, net-benefit gate, expectation, plan and explanation."""
