"""Specs on meshes: correction, NamedShardings, placed arrays, constraints, the mesh of a context.

Must not know how a rule is matched.
"""
