"""Logical axis names of arrays, and rules for them, at random."""

from __future__ import annotations

from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

NAMES = ["batch", "embed", "heads", "mlp", "layers", "vocab"]
AXES = ["dp", "fsdp", "tp", "sp"]
MESH_AXES = st.one_of(
    st.none(), st.sampled_from(AXES), st.lists(st.sampled_from(AXES), max_size=3).map(tuple)
)
RULES = st.lists(st.tuples(st.sampled_from(NAMES), MESH_AXES), max_size=14)
ENTRIES = st.one_of(st.none(), st.sampled_from(NAMES), st.just(P.UNCONSTRAINED))
ARRAYS = st.lists(ENTRIES, max_size=5)
