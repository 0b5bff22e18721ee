"""From a tree and rules to columns: the walk, derivation, and what each kind gets on a mesh."""
