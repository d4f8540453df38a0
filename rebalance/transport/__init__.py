"""How bytes of experts move between ranks: interface, choice, implementations."""
