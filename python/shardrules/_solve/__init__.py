"""The best sharding of a step: what can be chosen, what it costs, and the search."""
