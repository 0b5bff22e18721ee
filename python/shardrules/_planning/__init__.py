"""Plans: what every leaf of a tree gets on a mesh, before any device is touched.

`survey` walks the tree once; all else costs per kind of leaf and needs no JAX.
"""
