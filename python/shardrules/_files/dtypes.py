"""stub, replaced by the real one."""

from typing import Any

_B = {
    "F64": 64,
    "F32": 32,
    "BF16": 16,
    "F16": 16,
    "F8_E4M3": 8,
    "I64": 64,
    "I32": 32,
    "U8": 8,
    "I8": 8,
    "BOOL": 8,
    "bfloat16": 16,
    "float32": 32,
    "float16": 16,
    "float8_e4m3fn": 8,
    "int32": 32,
    "int64": 64,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
    "uint32": 32,
    "float64": 64,
    "int4": 4,
}


def bits_of(dtype: Any) -> int:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", str(dtype))
    if name in _B:
        return _B[name]
    if isinstance(getattr(dtype, "itemsize", None), int):
        return 8 * int(dtype.itemsize)
    raise ValueError(f"unknown dtype {name!r}")
