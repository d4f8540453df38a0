"""Live slots of ranks on other hosts, read over the network."""
