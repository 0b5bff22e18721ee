"""Solves how a step is sharded: problem, optimum, and its rules, constraints and proof."""
