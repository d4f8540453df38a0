"""A rank, the group that it is in, and its threads beside the step."""
