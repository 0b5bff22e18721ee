"""Logical axis names: rules from names to mesh axes, in the dialects of flax.linen and flax.core.

Must not know about paths.
"""
