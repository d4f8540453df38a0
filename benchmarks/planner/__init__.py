"""The planner: plans, effort, price, dispatch rules."""
