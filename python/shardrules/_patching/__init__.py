"""Replaces functions of other libraries by ours, for programs whose imports cannot be changed.

Must change only the time that a program takes.
"""
