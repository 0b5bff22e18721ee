"""Commands of `shardrules`: a file for each, whose name it has, with its options and its run.

Functions import what they need, so that the help of all commands costs little.
"""
