"""The rounds: which clients take part, the mean of their uploads, client states, observers, simulated time."""
