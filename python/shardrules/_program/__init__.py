"""Reads compiled programs: their arguments, collectives and memory, and what these are made from."""
