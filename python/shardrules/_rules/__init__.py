"""Rules on paths: patterns compiled, whole trees matched, dialects, what a rule list covers.

From `rules.py` to the C++ core in one call. Must not know how a spec is made to fit a mesh.
"""
