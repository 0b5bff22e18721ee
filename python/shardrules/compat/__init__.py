"""Drop-in modules, one per library: its names and signatures on this package's engine.

Each is thin; none needs the library that it stands in for.
"""
