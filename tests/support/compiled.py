"""A step that is compiled to its end, on a mesh of devices or on those of its arguments."""

from typing import Any

from shardrules._program.compiler import compile_whole
from shardrules._program.lowering import lowering_on, target_mesh


def compiled_on(step: Any, *args: Any, on: Any = None) -> Any:
    """Return what JAX compiles, for `verify` and `inspect`."""
    mesh = None if on is None else target_mesh(on, args)
    return compile_whole(lowering_on(mesh, step, args).lowered, mesh)
