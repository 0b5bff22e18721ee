"""Meshes, specs on a mesh, and the bytes that its devices hold."""
