"""Readers for models and rules in files, which are parsed, never executed or unpickled."""
