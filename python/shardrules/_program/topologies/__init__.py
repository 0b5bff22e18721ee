"""Topologies of TPUs and GPUs that need not be there."""
