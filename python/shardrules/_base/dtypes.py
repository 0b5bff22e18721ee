"""Dtypes by name: the bits of an element, the names in safetensors, and what converts to what.

Tables of names, so that reading a file needs neither numpy nor ml_dtypes.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Final

from shardrules._base.text import brief, near_names, shown

_NAMES_BY_BITS: Final = {
    1: "int1 uint1",
    2: "int2 uint2",
    4: "int4 uint4 float4_e2m1fn",
    6: "float6_e2m3fn float6_e3m2fn",
    8: "bool int8 uint8 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    16: "int16 uint16 float16 bfloat16",
    32: "int32 uint32 float32",
    64: "int64 uint64 float64 complex64 key<fry>",
    128: "complex128 key<rbg> key<urbg>",
}

BITS: Final = {name: bits for bits, names in _NAMES_BY_BITS.items() for name in names.split()}
"""Bits of one element, by the name of the dtype in numpy, ml_dtypes or JAX, which has random keys.

Types of less than a byte are packed, as in safetensors and on accelerators.
"""

SAFETENSORS: Final = {
    "BOOL": "bool", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
    "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Names in safetensors 0.8, with the names in numpy and ml_dtypes."""

RANDOM_KEYS: Final = {"threefry2x32": "key<fry>", "rbg": "key<rbg>", "unsafe_rbg": "key<urbg>"}
"""JAX's implementations of random keys, with the names of their dtypes."""


def numpy_name(name: str) -> str:
    """Return the name of a dtype in numpy or ml_dtypes, from that or the one in safetensors."""
    numpy_dtype = SAFETENSORS.get(name, name)
    if numpy_dtype in BITS:
        return numpy_dtype
    if spelt := SAFETENSORS.get(name.upper().replace("FP", "F")):
        raise ValueError(f"unknown dtype {brief(name)}; did you mean {spelt!r}?")
    near = near_names(name, SAFETENSORS) + near_names(name, BITS)
    examples = near or ["float32", "bfloat16", "F32", "BF16"]
    raise ValueError(f"unknown dtype {brief(name)}; known ones are {', '.join(examples)}")


def bits_of(dtype: object) -> int:
    """Return the number of bits of one element.

    Args:
        dtype: A name in numpy, ml_dtypes or safetensors; a numpy dtype; or an object with an
            `itemsize` in bytes, such as the dtype of JAX's random keys.
    """
    try:
        return _bits_of(dtype)
    except TypeError:  # an object that has no hash
        return _bits_of.__wrapped__(dtype)


@lru_cache  # numpy takes long to name a dtype
def _bits_of(dtype: object) -> int:
    if isinstance(dtype, str):
        return BITS[numpy_name(dtype)]
    bits = BITS.get(getattr(dtype, "name", ""))
    if bits is not None:
        return bits
    item_bytes = getattr(dtype, "itemsize", None)
    if isinstance(item_bytes, int):
        return 8 * item_bytes
    raise ValueError(f"unknown dtype {brief(dtype)}; it has neither a known name nor an itemsize")


def is_inexact(dtype: object) -> bool:
    """Return whether it is a dtype of real or complex numbers, which alone have gradients."""
    name = SAFETENSORS.get(dtype, dtype) if isinstance(dtype, str) else getattr(dtype, "name", "")
    return name in BITS and name.startswith(("float", "bfloat", "complex"))


def as_dtype(name: str, dtype: Any) -> Any:
    """Return a dtype that a user gives as the parameter `name`, in a form that numpy and JAX know.

    Classes such as np.float32 and jnp.bfloat16 stand for dtypes as well.
    """
    import numpy as np

    try:
        is_class = isinstance(dtype, type) or isinstance(getattr(dtype, "dtype", None), np.dtype)
        converted = np.dtype(dtype) if is_class else dtype
        bits_of(converted)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {shown(dtype)}, which is no dtype: {error}") from None
    return numpy_name(converted) if isinstance(converted, str) else converted


def as_bits(name: str, dtype: Any) -> int:
    """Return the number of bits of one element of such a dtype."""
    return bits_of(as_dtype(name, dtype))


def as_dtype_name(name: str, dtype: Any) -> str:
    """Return the name in numpy or ml_dtypes of such a dtype."""
    converted = as_dtype(name, dtype)
    try:
        return numpy_name(str(getattr(converted, "name", converted)))
    except ValueError as error:
        raise ValueError(f"{name} is {shown(dtype)}, which is no dtype: {error}") from None


def as_float_name(name: str, dtype: Any) -> str:
    """Return the name of a dtype that all floating arrays are to have."""
    float_name = as_dtype_name(name, dtype)
    if not converts("float32", float_name):
        raise ValueError(
            f"{name} is {shown(dtype)}, and must be a float, such as 'bfloat16': most weights are "
            f"fractions, which {float_name} has not; quantise them with a library that makes scales"
        )
    return float_name


def converts(source: str, target: str) -> bool:
    """Tell if a conversion that is asked for by name can be meant: within a kind of numbers."""
    return source == target or _number_kind(source) == _number_kind(target) != ""


def _number_kind(dtype: str) -> str:
    """Return "int", "float" or "complex" for numbers of 8 bits or more.

    Empty for codes and for flags.
    """
    if BITS.get(dtype, 0) < 8 or dtype == "float8_e8m0fnu":  # powers of two, for scales
        return ""
    return next((kind for kind in ("int", "float", "complex") if kind in dtype), "")


def is_plain_float(name: str) -> bool:
    """Return whether this is a floating dtype of 16 bits or more: not one of quantized values."""
    return name in ("float16", "bfloat16", "float32", "float64")


@cache
def key_dtype(name: str) -> Any:
    """JAX's dtype of random keys of this name; None for all other names."""
    implementation = next((impl for impl, dtype in RANDOM_KEYS.items() if dtype == name), None)
    if implementation is None:
        return None
    import jax

    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
