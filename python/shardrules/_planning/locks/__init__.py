"""Lockfiles: a plan as a JSON text that is read in reviews and compared in CI.

Siblings are folded, so a lock of 10^5 leaves has some dozens of lines, and nothing is lost.
"""
