"""Checkpoints and live trees onto a mesh: each process reads and moves only what it needs."""
