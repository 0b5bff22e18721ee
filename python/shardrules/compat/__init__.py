"""Drop-in modules, one per library: its names and signatures on this package's engine.

Each is thin; none needs the library that it stands in for.
"""

# Its modules are imported by their names, each when it is wanted.
__all__: list[str] = []
