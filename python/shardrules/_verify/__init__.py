"""Compiled programs and live arrays against a plan."""
