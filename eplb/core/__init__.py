"""What every part of the planner works with: placements, topology, loads, problems, arrays."""
