"""Checkpoints and live trees onto a mesh: each process reads and moves only what it needs.

Must not know how a sharding was decided, nor about the command line.
"""
