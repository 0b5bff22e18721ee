"""A step that is lowered, or compiled to its end, on a mesh of devices or on those of its arguments."""

from typing import Any

from shardrules._program import lowering
from shardrules._program.compiler import compile_whole


def lowered_on(mesh: Any, step: Any, *args: Any) -> Any:
    """Return what JAX lowers."""
    return lowering.lowered_on(mesh, step, args)[0]


def compiled_on(step: Any, *args: Any, on: Any = None) -> Any:
    """Return what JAX compiles, for `verify` and `inspect`."""
    mesh = None if on is None else lowering.target_mesh(on, args)
    return compile_whole(lowered_on(mesh, step, *args), mesh)
