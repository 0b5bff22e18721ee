"""`shard` and `gather`: whole trees onto devices and back.

In one process it is one batched call, and nothing is compiled per leaf. In several processes each
device gets its own part of what the hosts hold, and the processes first agree on what they do. Must
not know how a sharding was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardrules._arguments import check_tree
from shardrules._correction import Correction
from shardrules._sharding.agreement import JointCall
from shardrules._sharding.leaf_rows import canonical_dtype, is_spread, rows_of
from shardrules._sharding.leaf_shardings import asks_for_own_devices, requested_shardings
from shardrules._words import shown

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._sharding.mesh import MeshLike

__all__ = ["agreed_shardings", "gather", "put", "shard"]


def shard(
    tree: Any,
    specs_or_rules: Any,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
) -> Any:
    """The tree with its arrays and numbers as jax.Arrays, placed as the rules say.

    In several processes, each calls this with the same tree, or at least with its own shards' part
    of each array right; no device ever holds more than its shards. They agree on what they are
    about to do first, unless all devices of the mesh are this process's.

    Args:
        tree: A pytree of jax.Arrays, numpy arrays and Python numbers. Functions and bools in it,
            and whatever else an attribute of an equinox module is, are left as they are.
        specs_or_rules: As in `with_sharding_constraint`; None leaves a leaf where it is.
        mesh: A Mesh, for rules and PartitionSpecs; the context's unless given.
        correction: Instead of the dialect's; eformer's for specs.

    Returns:
        A tree of the same structure. As with `jax.device_put`, an array that is in place already
        is not copied but returned, so to donate one deletes the other; a numpy array may share its
        memory with what comes back. Rules and specs leave an array in the kind of memory that it
        is in; a NamedSharding has one.

    Raises:
        ValueError: As `named_shardings`; before anything is placed.
        TypeError: A leaf is no array and no number, the mesh is an abstract one, or this is inside
            jit.
        RuntimeError: In several processes: they are about to do different things, or one has
            failed, or has not come in time.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
        >>> placed = shard({"w": np.ones((4, 4)), "step": 3}, [("w", "tp")], mesh)
        >>> tuple(placed["w"].sharding.spec)
        ('tp', None)
    """
    leaves, treedef, wanted = agreed_shardings(
        "shard", tree, specs_or_rules, mesh, correction=correction, chosen=_of_placeable
    )
    placed = list(leaves)
    chosen = [i for i, sharding in enumerate(wanted) if sharding is not None]
    shardings: list[Any] = [wanted[i] for i in chosen]
    for index, array in zip(chosen, put([leaves[i] for i in chosen], shardings), strict=True):
        placed[index] = array
    return treedef.unflatten(placed)


def gather(tree: Any) -> Any:
    """The tree with its jax.Arrays as whole numpy arrays on this host.

    In several processes, each calls this with the same tree. Arrays that are spread over them are
    replicated on the way, one after the other: each device needs room for the largest. Without such
    an array the call is this process's own, and may be made by one alone.

    Args:
        tree: Any pytree. Leaves that are no jax.Array, and random keys, are left alone.

    Raises:
        TypeError: This is inside jit.
        RuntimeError: As `shard`, if there are arrays that are spread over processes.

    Example:
        >>> import jax
        >>> gather([jax.numpy.ones(2), 3])
        [array([1., 1.], dtype=float32), 3]
    """
    import jax
    from jax.core import Tracer

    with JointCall("gather") as call:
        check_tree("tree", tree)
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        at_once, spread = [], {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, jax.Array):
                continue
            if isinstance(leaf, Tracer):
                raise TypeError(
                    "gather fetches arrays from devices, and inside jit and the like there are "
                    "none: call it outside"
                )
            if leaf.is_fully_addressable or leaf.is_fully_replicated:
                at_once.append(index)
            else:
                spread[index] = _replicated(leaf.sharding)
        if not spread:
            call.alone()
        call.agree(lambda: rows_of(tree, spread))
    for index, sharding in spread.items():
        # All devices are done with one before the next takes room.
        replicated = jax.block_until_ready(jax.device_put(leaves[index], sharding))
        leaves[index] = jax.device_get(replicated)
    fetched = jax.device_get([leaves[i] for i in at_once])
    for index, array in zip(at_once, fetched, strict=True):
        leaves[index] = array
    return jax.tree_util.tree_unflatten(treedef, leaves)


def agreed_shardings(
    name: str,
    tree: Any,
    specs_or_rules: Any,
    mesh: MeshLike | None,
    *,
    correction: Correction | None,
    chosen: Callable[[Any, list[Any], list[Any]], list[Any]] | None = None,
) -> tuple[list[Any], Any, list[NamedSharding | None]]:
    """As `requested_shardings`, once all processes have the same.

    Args:
        name: The function that is called.
        tree: Any pytree.
        specs_or_rules: As in `requested_shardings`, and so are the next two.
        mesh: For rules and PartitionSpecs.
        correction: Instead of the dialect's.
        chosen: What becomes of the tree, its leaves and the shardings requested: those that are
            left.
    """
    with JointCall(name) as call:
        if call.joint and asks_for_own_devices(specs_or_rules, mesh):
            call.alone()
        leaves, treedef, wanted = requested_shardings(tree, specs_or_rules, mesh, correction)
        if chosen is not None:
            wanted = chosen(tree, leaves, wanted)
        call.agree(lambda: rows_of(tree, dict(enumerate(wanted))))
    return leaves, treedef, wanted


def put(leaves: list[Any], shardings: list[NamedSharding], *, may_alias: bool = True) -> list[Any]:
    """What jax.device_put does, in one batch, without what it does for each leaf.

    In several processes each does its own devices' part of the host's arrays; JAX's own would
    compare the data between all processes. An array on other devices, as a fresh one on a single
    device, goes through the host; JAX would compile a program to cut it.

    Args:
        leaves: Arrays and numbers.
        shardings: Of each leaf.
        may_alias: Whether what comes back may be, or share its memory with, a jax.Array that was
            given.
    """
    import jax

    elsewhere = [
        i
        for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
        if sharding.is_fully_addressable and _is_plain_array_elsewhere(leaf, sharding)
    ]
    fetched = jax.device_get([leaves[i] for i in elsewhere])
    on_host = dict(zip(elsewhere, fetched, strict=True))
    ready = [
        _from_own_parts(leaf, sharding)
        if not sharding.is_fully_addressable and not is_spread(leaf)
        else on_host.get(i, leaf)
        for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
    ]
    return jax.device_put(ready, shardings, may_alias=None if may_alias else False)  # type: ignore[no-any-return]


def _is_plain_array_elsewhere(leaf: Any, sharding: NamedSharding) -> bool:
    import jax
    import jax.numpy as jnp

    return (
        isinstance(leaf, jax.Array)
        and leaf.sharding.device_set != sharding.device_set
        # A numpy array has neither weak types nor random keys.
        and not getattr(leaf, "weak_type", False)
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def _of_placeable(
    tree: Any, leaves: list[Any], shardings: list[NamedSharding | None]
) -> list[NamedSharding | None]:
    """The shardings, None for leaves that stay as they are."""
    import jax
    from jax.core import Tracer
    from jax.sharding import Mesh

    chosen = list(shardings)
    others = [index for index, leaf in enumerate(leaves) if not _can_be_placed(leaf)]
    for index, path in _paths(tree, others):
        if chosen[index] is None:
            continue
        if not _stays(leaves[index], path) or len(others) == len(leaves):
            raise TypeError(
                f"the leaf {jax.tree_util.keystr(path) or '(the tree)'} is "
                f"{shown(leaves[index])}; only arrays and numbers can be placed: take it out of "
                "the tree, or give None for it instead of a spec (of an equinox module, place the "
                "arrays that eqx.partition(model, eqx.is_array) gives)"
            )
        chosen[index] = None
    for leaf, sharding in zip(leaves, chosen, strict=True):
        if sharding is None:
            continue
        if isinstance(leaf, Tracer):
            raise TypeError(
                "shard places arrays on devices, and inside jit and the like there are none yet: "
                "use with_sharding_constraint, which takes the same arguments"
            )
        if not isinstance(sharding.mesh, Mesh):
            raise TypeError(
                "arrays can be placed on a jax.sharding.Mesh of devices; this mesh is "
                f"{shown(sharding.mesh)}"
            )
    return chosen


def _paths(tree: Any, indices: list[int]) -> list[tuple[int, tuple[Any, ...]]]:
    """(index, keys) of these leaves."""
    from jax import tree_util

    if not indices:
        return []
    paths = tree_util.tree_flatten_with_path(tree)[0]
    return [(index, paths[index][0]) for index in indices]


def _stays(leaf: Any, path: tuple[Any, ...]) -> bool:
    """Whether it is a part of a model that is no data: a flag, a function, another attribute."""
    from jax.tree_util import GetAttrKey

    if hasattr(leaf, "shape") and not isinstance(leaf, type):  # an abstract array
        return False
    # A flag that has become an array cannot be asked inside jit any more. A text as an attribute is
    # an option of its module; among the parameters in a dict it is a mistake.
    return isinstance(leaf, bool) or callable(leaf) or isinstance((path or (None,))[-1], GetAttrKey)


def _can_be_placed(leaf: Any) -> bool:
    import jax
    import numpy as np

    return isinstance(
        leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)
    ) and not isinstance(leaf, bool)


def _from_own_parts(leaf: Any, sharding: NamedSharding) -> Any:
    """The global array of which this process's devices get their parts of the host's."""
    import jax

    host, weak = _on_host(leaf)
    array = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    return jax.jit(_weak, out_shardings=sharding)(array) if weak else array


def _on_host(leaf: Any) -> tuple[Any, bool]:
    """(the leaf with the dtype that it has on devices, whether its type is weak)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf, False  # random keys
    host = np.asarray(leaf)
    host = host.astype(canonical_dtype(host), copy=False)
    return host, getattr(leaf, "weak_type", type(leaf) in (int, float, complex))


def _weak(array: Any) -> Any:
    # Else a number would be promoted otherwise in several processes than in one.
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(array, weak_type=True)


def _replicated(sharding: Any) -> NamedSharding:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(sharding.mesh, PartitionSpec())
