"""`plan`: the spec of every leaf of a tree on a mesh, before any device is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from shardrules._base.arguments import as_tuple, check_items
from shardrules._base.mistakes import check_arrays, in_order
from shardrules._base.rule_specs import Correction
from shardrules._place.decider import ByNames, ByPaths, BySpecs, RulesLike, as_decider
from shardrules._place.mesh import MeshLike, resolve_mesh
from shardrules._plan.align import survey_planned
from shardrules._plan.bases import with_companions
from shardrules._plan.companions import Companion
from shardrules._plan.leaves import (
    check_rules_are_for_paths,
    leaves_by_specs,
    mesh_of_shardings,
    survey,
    survey_named,
)
from shardrules._plan.plan import Plan
from shardrules._plan.resolve import put_by_rules, sized_mesh

_COMPANIONS: Final = "Companion records: write shardrules.LORA, or [shardrules.stacked('layers')]"


@in_order("tree", "rules", "mesh")
def plan(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    companions: Iterable[Companion] = (),
    names: Any = None,
) -> Plan:
    """Plan how each leaf of the tree is sharded on the mesh, and why.

    The specs are those of `named_shardings`. A leaf that gets none is a finding of `Plan.check`,
    and an error only when the specs are asked for. No device is needed, and no array is kept.

    Args:
        tree: Any pytree of arrays or abstract arrays; only `.shape` and `.dtype` are read.
        rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; PartitionSpecs or NamedShardings,
            one for all leaves or a tree of them, as rules for exactly these paths; or another
            `Plan`, which has leaves of the same paths and shapes.
        mesh: A Mesh, AbstractMesh or dict of axis sizes. Default: that of the shardings or the
            other plan, or else of the context.
        correction: For specs: the policies for those that do not fit. Default: `Correction()`.
            Rules have their own.
        companions: Leaves that follow the rules of other paths, such as those of `LORA`,
            `QUANTIZED` or `stacked`. The first that finds a leaf's path counts, and so for the path
            of its base. For rules of paths.
        names: For `LogicalRules`, the logical axis names of the arrays: a tree of tuples or
            PartitionSpecs of names, or {path: names}. Default: those in the tree's boxes, nnx
            Variables or haliax arrays.

    Raises:
        ValueError: There is no mesh, a dimension is negative, a dtype is unknown, or names do not
            fit the tree.
        TypeError: A rule's spec cannot be made a PartitionSpec; a shape is not one; the tree is not
            a tree of arrays; pairs are for the logical axis names of the tree's boxes; or the rules
            are `LogicalRules`, and nothing has names.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> tree = {"wq": jax.ShapeDtypeStruct((512, 30), "bfloat16")}
        >>> plan = sr.plan(tree, [("wq", ("fsdp", "tp"))], {"fsdp": 8, "tp": 4})
        >>> plan.bytes_per_device().max
        3840
    """
    decider = as_decider("rules", rules, correction, names)
    records = as_tuple("companions", companions, _COMPANIONS)
    check_items("companions", records, Companion, "a Companion, such as those of shardrules.LORA")
    if records and not isinstance(decider, ByPaths):
        raise ValueError("companions are for rules of paths alone: leave them out")
    if isinstance(decider, Plan):
        return decider._for(*survey_planned(tree, decider._leaves), mesh)
    if isinstance(decider, BySpecs) and mesh is None:
        mesh = mesh_of_shardings(rules)
    # A mesh of the context is taken now: later another one may be in force. One that is wrong is
    # refused before the walk.
    on = sized_mesh(mesh if isinstance(mesh, Mapping) else resolve_mesh(mesh))
    if isinstance(decider, ByNames):
        leaves = survey_named(tree, decider.rules, names)
    elif isinstance(decider, ByPaths):
        leaves = survey(tree, decider.rules)
        check_rules_are_for_paths(leaves, decider.rules, tree)
        leaves = with_companions(leaves, decider.rules, records)
    else:
        leaves = leaves_by_specs(survey(tree), rules, correction)
    planned = Plan(partial(put_by_rules, leaves), on)
    if {kind.shape for kind in planned.kinds} <= {None}:
        check_arrays("tree", tree, needs_shape=True)
    return planned
