"""From one placement to the next: moves, transactions, spare slots, serialisation, recovery."""
