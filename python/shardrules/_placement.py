"""`shard` and `gather`: whole trees onto devices and back, in one batched call each.

Nothing is compiled per leaf. In several processes each device gets its own part of what the hosts
hold, and the processes first agree on the plan. Must not know how a sharding was decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrules._correction import Correction
from shardrules._fingerprint import check_same_in_all_processes, fingerprint
from shardrules._requests import requested_shardings
from shardrules._specs import shown

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardrules._mesh import MeshLike


def shard(
    tree: Any,
    specs_or_rules: Any,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
) -> Any:
    """The tree with its leaves as jax.Arrays, placed as the rules say.

    In several processes, each calls this with the same tree, or at least with its own shards' part
    of each array right; no device ever holds more than its shards. The processes compare what they
    are about to do first.

    Args:
        tree: A pytree of jax.Arrays, numpy arrays and Python numbers.
        specs_or_rules: As in `with_sharding_constraint`; None leaves a leaf where it is.
        mesh: A Mesh, for rules and PartitionSpecs; the context's unless given.
        correction: Instead of the dialect's; eformer's for specs.

    Returns:
        A tree of the same structure. An array that is in place already is not copied.

    Raises:
        ValueError: As `named_shardings`; before anything is placed.
        TypeError: A leaf is no array and no number, or the mesh is an abstract one.
        RuntimeError: The processes do not agree on the shardings.

    Example:
        >>> import jax, numpy as np
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
        >>> placed = shard({"w": np.ones((4, 4)), "step": 3}, [("w", "tp")], mesh)
        >>> tuple(placed["w"].sharding.spec)
        ('tp', None)
    """
    import jax
    from jax.sharding import Mesh

    leaves, treedef, wanted = requested_shardings(tree, specs_or_rules, mesh, correction)
    placed = list(leaves)
    chosen = [i for i, sharding in enumerate(wanted) if sharding is not None]
    shardings: list[Any] = [wanted[i] for i in chosen]
    for index, sharding in zip(chosen, shardings, strict=True):
        if not isinstance(sharding.mesh, Mesh):
            raise TypeError(
                "arrays can be placed on a jax.sharding.Mesh of devices; this mesh is "
                f"{shown(sharding.mesh)}"
            )
        if not _can_be_placed(leaves[index]):
            path = jax.tree_util.tree_flatten_with_path(tree)[0][index][0]
            raise TypeError(
                f"the leaf {jax.tree_util.keystr(path)} is {shown(leaves[index])}; only arrays and "
                "numbers can be placed"
            )
    if jax.process_count() > 1:
        check_same_in_all_processes(fingerprint(tree, wanted), "the plan of shard()")
    put = _put_across_processes if jax.process_count() > 1 else put_at_once
    for index, array in zip(chosen, put([leaves[i] for i in chosen], shardings), strict=True):
        placed[index] = array
    return treedef.unflatten(placed)


def gather(tree: Any) -> Any:
    """The tree with its jax.Arrays as whole numpy arrays on this host.

    In several processes, arrays that are spread over them are first replicated, in one compiled
    call for all: each device must have room for what is spread.

    Args:
        tree: Any pytree. Leaves that are no jax.Array are left alone.

    Example:
        >>> import jax
        >>> gather([jax.numpy.ones(2), 3])
        [array([1., 1.], dtype=float32), 3]
    """
    import jax

    leaves, treedef = jax.tree_util.tree_flatten(tree)
    arrays: dict[int, Any] = {
        i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)
    }
    spread = [
        i
        for i, array in arrays.items()
        if not (array.is_fully_addressable or array.is_fully_replicated)
    ]
    if spread:
        replicated = [
            jax.sharding.NamedSharding(arrays[i].sharding.mesh, jax.sharding.PartitionSpec())
            for i in spread
        ]
        moved = _moved([arrays[i] for i in spread], replicated)
        arrays.update(zip(spread, moved, strict=True))
    fetched = jax.device_get(list(arrays.values()))
    for index, array in zip(arrays, fetched, strict=True):
        leaves[index] = array
    return jax.tree_util.tree_unflatten(treedef, leaves)


def put_at_once(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """jax.device_put in one batch, without what it compiles for each leaf.

    An array on other devices, as a fresh one on a single device, would be cut there by a program of
    its own; it goes through the host instead, which compiles nothing.
    """
    import jax

    elsewhere = [
        i
        for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set != sharding.device_set
    ]
    fetched = jax.device_get([leaves[i] for i in elsewhere])
    on_host = dict(zip(elsewhere, fetched, strict=True))
    sources = [on_host.get(i, leaf) for i, leaf in enumerate(leaves)]
    return jax.device_put(sources, shardings)  # type: ignore[no-any-return]


def _can_be_placed(leaf: Any) -> bool:
    import jax
    import numpy as np

    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def _put_across_processes(leaves: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """What jax.device_put does, of which each process does its own devices' part."""
    import jax
    import numpy as np

    placed = list(leaves)
    spread = []
    for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            spread.append(index)
            continue
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        placed[index] = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    moved = _moved([leaves[i] for i in spread], [shardings[i] for i in spread])
    for index, array in zip(spread, moved, strict=True):
        placed[index] = array
    return placed


def _moved(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """Arrays that are spread over processes, laid out anew: one compiled call for all of them."""
    import jax

    if not arrays:
        return []
    return jax.jit(lambda xs: xs, out_shardings=shardings)(arrays)  # type: ignore[no-any-return]
