"""How experts move in vLLM: checked records of peers, of this host's memory, and of the disk."""
