"""Rules on paths: patterns compiled, whole trees matched, dialects, what a rule list covers.

From `rules.py` to the C++ core in one call. A dialect has the correction that its library makes; no module here makes one.
"""
