"""The columns of a plan whose leaves rules decide: of each kind its rule's spec, put on the mesh.

Costs one correction per kind, two where axes are factored, and no walk. Must not know what is asked
of columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardrules._planning.columns import Columns
from shardrules._planning.placing.on_mesh import RulesOnMesh, explicit_axes_of, mesh_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardrules._correction import Correction
    from shardrules._matching.rules import Rules
    from shardrules._planning.leaves import Leaves
    from shardrules._planning.placing.derive import Derivation
    from shardrules._sharding.mesh import MeshLike

__all__ = ["by_rules"]


def by_rules(
    leaves: Leaves,
    rules: Rules,
    derivations: Iterable[Derivation | None],
    correction: Correction,
    mesh: MeshLike,
    *,
    optional_axes: frozenset[str] = frozenset(),
    may_lack: frozenset[str] = frozenset(),
) -> Columns:
    """The sharding of each leaf on the mesh.

    Args:
        leaves: As surveyed.
        rules: What decides them.
        derivations: Per kind how it follows a base, or None.
        correction: For rules that have none of their own.
        mesh: A mesh of any form.
        optional_axes: Axes that a mesh may lack, beside those of each rule.
        may_lack: Further axes that this one may lack.

    Raises:
        TypeError: A rule's spec cannot be made a PartitionSpec.
        ValueError: The leaves need factors of axes, and the mesh cannot be factored.
    """
    types = list(zip(leaves.types, derivations, strict=True))
    optional = optional_axes | may_lack
    on_mesh = RulesOnMesh(rules, correction, mesh, optional)
    axis_sizes = on_mesh.factored(types)
    if axis_sizes != on_mesh.axis_sizes:
        mesh = mesh_on(mesh, axis_sizes)
        on_mesh = RulesOnMesh(rules, correction, mesh, optional)
    kinds = [on_mesh.kind(*one) for one in types]
    return Columns(leaves, kinds, on_mesh.axis_sizes, explicit_axes_of(mesh))
