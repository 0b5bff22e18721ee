"""Rules from specs: patterns in the words of the paths, or a table of logical axis names."""
