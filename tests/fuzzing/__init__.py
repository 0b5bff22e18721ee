"""Fuzz targets for what Python reads and walks: `python -m tests.fuzzing`, on atheris.

targets.py has the targets, functions of bytes; corpus/NAME/ their seeds, and what once failed under
a name that says what it was. tests/fuzzing/test_fuzzing.py runs all of these without atheris.
"""
