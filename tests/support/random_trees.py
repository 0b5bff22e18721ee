"""Random rules and trees of arrays, for the functions of libraries and for ours."""

from typing import Any

import jax
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

KEYS = st.one_of(
    st.sampled_from(["layers", "mlp", "kernel", "bias", "wq", "0", "1", "a b", "é", "it's", "", "\n"]),
    st.text(max_size=4),
)
ARRAYS = st.lists(st.sampled_from([0, 1, 1, 2, 5, 9]), max_size=4).map(
    lambda shape: jax.ShapeDtypeStruct(tuple(shape), "float32")
)
SPECS = st.lists(st.sampled_from([None, "tp", "dp", ("ep", "fsdp")]), max_size=4).map(lambda entries: P(*entries))
PATTERNS = st.sampled_from(
    ["kernel", "layers/.*", "layers.*0", r"\d", "^mlp", "^.*wq$", "(a|b|é)", "[^/]+/0", r"\bias", ".", "$^",
     "1/", r"\['é'\]", "(?!k)bias"]
)  # fmt: skip
RULES = st.lists(st.tuples(PATTERNS, SPECS), max_size=4)


def trees(*others: Any) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(ARRAYS, st.sampled_from(others)) if others else ARRAYS,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=4),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.integers(-2, 12), inner, max_size=3),
            st.none(),
        ),
        max_leaves=12,
    )
