"""What a rank's agent is made of, and its threads beside the step."""
