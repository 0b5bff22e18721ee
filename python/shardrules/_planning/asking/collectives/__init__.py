"""What a training step sends: the schedule, and the collectives that follow from it."""
