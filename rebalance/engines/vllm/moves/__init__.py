"""How experts move in vLLM: by its communicator, checked, else from the host cache's records."""
