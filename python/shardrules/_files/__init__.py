"""Readers for models and rules in files.

Files are parsed, never executed or unpickled. Only the headers of tensor files are read. Only the
form `module:name` executes anything. Must not make PartitionSpecs, nor import JAX by itself.
"""
