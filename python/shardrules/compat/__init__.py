"""Drop-in replacements, one module per library, with its names and signatures.

None of them needs the library that it replaces.
"""

# Import the modules by their names.
__all__: list[str] = []
