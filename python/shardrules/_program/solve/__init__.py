"""Solves how a step is sharded: layouts, their prices, the best, and its rules and constraints."""
