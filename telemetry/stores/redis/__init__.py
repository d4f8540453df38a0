"""The store in Redis, single or cluster, for several hosts."""
