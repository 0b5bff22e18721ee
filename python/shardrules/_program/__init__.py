"""Reads compiled programs: arguments, collectives, memory, and what these are made from."""
