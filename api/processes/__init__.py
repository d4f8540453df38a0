"""Child processes: start, supervision, restart budgets, the deployment lease."""
