"""Rules for a model that has none, from its shapes and its paths.

Must not know about files or the command line.
"""
