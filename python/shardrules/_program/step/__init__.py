"""Reads a step before it is compiled: its dimensions, arithmetic, memory and traffic."""
