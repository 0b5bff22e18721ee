"""Estimates of traffic, step times and memory over meshes, from a plan and its names."""
