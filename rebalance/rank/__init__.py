"""Parts of a rank's agent, and its threads beside the step."""
