"""Trees: which leaf of one is which leaf of another, and errors of leaves."""
