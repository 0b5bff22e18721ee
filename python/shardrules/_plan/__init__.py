"""Plans: the sharding of each leaf of a tree on a mesh, before any device is touched.

The tree is walked once; all else costs per kind of leaf and needs no JAX.
"""
