"""Reads a step before it is compiled: its dimensions, what they are for, and its arithmetic."""
