"""Renames turned around, for `save`."""

from shardrules._checkpoint.inverses import inverse as inverse
