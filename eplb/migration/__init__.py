"""From one placement to the next: moves, transactions, rounds, serialisation."""
