"""Specs on meshes: corrections, NamedShardings, placed arrays, constraints, contexts' meshes.

Must not know how a rule is matched.
"""
