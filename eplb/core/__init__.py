"""Types that all of the planner uses: placement, topology, load, problem, arrays."""
