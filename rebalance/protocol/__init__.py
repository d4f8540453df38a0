"""The migration protocol: phase machine, ballots, votes, liveness, journal."""
