"""Meshes, specs on a mesh, and the bytes that devices hold."""
