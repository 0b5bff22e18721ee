"""Our functions in the place of those of libraries whose imports cannot be changed.

Must not change what a program does, only how long it takes.
"""
