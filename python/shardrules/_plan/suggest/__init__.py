"""Suggests rules for a model that has none, from its shapes and its paths."""
