"""The checks of `Plan.check`: functions from `Queries` to findings, in files by subject."""
