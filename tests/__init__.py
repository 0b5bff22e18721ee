"""Tests of shardrules: a package, so that no other package named `tests` takes its place."""
