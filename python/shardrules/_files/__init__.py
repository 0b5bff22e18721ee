"""The files that a command line reads: arrays' shapes, rules, and the text of a mesh.

Files are parsed, never executed or unpickled, and of tensors only headers are read; the one form
that executes anything is `module:name`. Must not make PartitionSpecs, nor import JAX by itself.
"""
