"""Plans: what every leaf of a tree gets on a mesh, before any device is touched.

`placing` makes columns (`columns.py`), `asking` answers questions about them, `locks` writes and
reads them, `showing` draws them; `plan.py` is the facade on top. The tree is walked once; all else
costs per kind of leaf and needs no JAX.
"""
