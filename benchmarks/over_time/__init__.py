"""Plans over time, beside the peers, on recorded and generated loads."""
