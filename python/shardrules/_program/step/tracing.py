"""`trace`: reads the jaxpr of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardrules._base.text import mesh_shown
from shardrules._place.mesh import as_mesh, in_force
from shardrules._place.named_arrays import leaf_paths
from shardrules._plan.plan import Plan
from shardrules._program.lowering import check_static, check_step, noted, placed_on, target_mesh
from shardrules._program.step.jaxprs import inputs_of
from shardrules._program.step.step import Step, TracedFunction
from shardrules._program.topologies.topology import Topology

if TYPE_CHECKING:
    from jax.sharding import Mesh


def trace(step: Any, *args: Any, on: Topology | Mesh | None = None) -> Step:
    """Read what a step does from its jaxpr: nothing is compiled, and nothing runs.

    This is what `solve` is made of; `prove` looks at what the compiler makes of the step.

    Args:
        step: A function, or what `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit` makes of one;
            give the jitted one for donation and `out_shardings`.
        *args: Its arguments, as `prove` takes them: a Plan stands for the tree that it plans.
        on: The mesh of the constraints in it, as `prove` takes it. Default: that of the plans, or
            without one that of the arguments' shardings.

    Returns:
        A `Step`: classes of dimensions with their roles, FLOPs by line, and memory.

    Raises:
        TypeError: The step is no function.
        ValueError: The arguments have several meshes.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((64, 256), "float32")}
        >>> plan = sr.plan(tree, [("w", ("fsdp", "tp"))], {"fsdp": 2, "tp": 4})
        >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
        >>> print(sr.trace(lambda params, x: x @ params["w"], plan, x).explain("w"))
        inputs/0/w float32[64, 256]
          dimension 0, 64: hidden 64
            summed over at <doctest shardrules._program.step.tracing.trace[4]>:1
          dimension 1, 256: no role 256
    """
    import jax

    check_step(step, args)
    check_static(step, args)
    mesh = _mesh_of(on, args)
    trees = placed_on(args, mesh)
    make: Any = partial(jax.make_jaxpr, return_shape=True)
    if type(step).__module__.startswith("equinox."):
        import equinox

        make = equinox.filter_make_jaxpr
    run = step
    bases = [base for tree in trees for base in type(tree).__mro__]
    if any(base.__module__.startswith("flax.nnx.") for base in bases):

        def run(*modules: Any) -> tuple[Any, Any]:
            return step(*modules), modules  # which the step may change

    with in_force(mesh), noted(step, args):
        closed, results, *_ = make(run)(*trees)
    traced = TracedFunction(step, closed, jax.tree_util.tree_structure(results))
    paths = [
        f"inputs/{place}/{path}" if path else f"inputs/{place}"
        for place, tree in enumerate(trees)
        for path in inputs_of(tree, step, leaf_paths(tree))
    ]
    name = getattr(step, "__name__", type(step).__name__)
    return Step(name, traced, args, paths, mesh)


def _mesh_of(on: Any, args: tuple[Any, ...]) -> Any:
    """Return the mesh of constraints; None if nothing says."""
    from jax.sharding import NamedSharding
    from jax.tree_util import tree_leaves

    if on is not None:
        return target_mesh(on, args)
    meshes = list(dict.fromkeys(as_mesh(arg._mesh) for arg in args if isinstance(arg, Plan)))
    what = "plans among the arguments"
    if not meshes:
        shardings = (getattr(leaf, "sharding", None) for leaf in tree_leaves(args))
        meshes = list(dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding)))
        what = "arguments"
    if len({tuple(mesh.shape.items()) for mesh in meshes}) > 1:
        texts = "; ".join(mesh_shown(mesh.shape) for mesh in meshes)
        raise ValueError(f"the {what} have several meshes: {texts}")
    return meshes[0] if meshes else None
