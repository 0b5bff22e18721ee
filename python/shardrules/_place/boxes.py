"""Boxes: what gives arrays logical axis names in a tree, nnx Variables and haliax arrays too."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from shardrules._base.specs import is_partition_spec
from shardrules._base.text import shown
from shardrules._rules.resolver import is_name


def loaded(module: str, name: str) -> Any:
    """Return an attribute of a module that is already imported; None if it is not."""
    return getattr(sys.modules.get(module), name, None)


def variable_types() -> tuple[type, ...]:
    """Return the classes Variable and (before flax 0.12) VariableState of nnx; () without nnx."""
    nnx = sys.modules.get("flax.nnx.variablelib")
    if nnx is None:
        return ()
    return tuple(getattr(nnx, name) for name in ("Variable", "VariableState") if hasattr(nnx, name))


def box_types() -> tuple[type, ...]:
    """Return the base classes of boxes, ours and flax's, that are already imported."""
    modules = ("shardrules.compat.flax_core_meta", "flax.core.meta")
    return tuple(sys.modules[name].AxisMetadata for name in modules if name in sys.modules)


def is_flax_struct(node: object) -> bool:
    """Return whether a node is a record of flax.struct, such as a TrainState."""
    # The public mark of `flax.struct.dataclass` is its `replace`, which others have as well.
    return bool(getattr(type(node), "_flax_dataclass", False))


def variable_sharding(variable: Any) -> Any:
    """Return the sharding of a Variable, usually a tuple of logical names; None if it has none."""
    metadata = variable.get_metadata()
    # flax before 0.12 says "sharding", and before that "sharding_names".
    spellings = ("out_sharding", "sharding_names", "sharding")
    return next(filter(None, map(metadata.get, spellings)), None)


def named_array_types() -> tuple[type, ...]:
    """Return the class NamedArray; () without haliax."""
    named_array = loaded("haliax.core", "NamedArray")
    return () if named_array is None else (named_array,)


class NodeForms:
    """Classifies the nodes of one tree, each type once."""

    __slots__ = ("_boxes", "_known", "_named", "_variables")

    def __init__(self) -> None:
        self._boxes = box_types()
        self._variables = variable_types()
        self._named = named_array_types()
        self._known: dict[type, str] = {tuple: "tuple"}

    def of(self, node: Any) -> str:
        """Return one of "spec", "tuple", "box", "variable", "named" or "other"."""
        form = self._known.get(type(node))
        if form is None:
            if is_partition_spec(node):
                form = "spec"
            elif isinstance(node, self._variables):
                form = "variable"
            elif isinstance(node, self._named):
                form = "named"
            else:
                form = "box" if isinstance(node, self._boxes) else "other"
            self._known[type(node)] = form
        return form

    def holds_array(self, node: Any) -> bool:
        """Return whether a node is an array with whatever says its names."""
        return self.of(node) in ("box", "variable", "named")

    def has_names(self, node: Any) -> bool:
        """Return whether a node is a leaf with names."""
        form = self.of(node)
        if form == "spec":
            return True
        if form == "tuple":  # an empty tuple is usually a node of the tree
            return len(node) > 0 and all(map(is_name, node))
        if form == "variable":
            return bool(variable_sharding(node))
        return form == "named" or (form == "box" and hasattr(node, "names"))

    def names_of(self, leaf: Any) -> Any:
        """Return the names of a leaf: () for an array, and the leaf itself if it is names."""
        form = self.of(leaf)
        if form == "variable":
            return variable_sharding(leaf)
        if form == "named":
            return tuple(axis.name for axis in leaf.axes)
        if form == "box":
            return leaf.names
        # flax replicates the arrays without a box in a tree of boxes.
        return () if form == "other" and hasattr(leaf, "shape") else leaf

    def check_some_have_names(self, leaves: list[Any]) -> None:
        """Check that not all leaves are arrays."""
        if leaves and all(self.of(x) == "other" and hasattr(x, "shape") for x in leaves):
            raise TypeError(_no_names(leaves[0], "a tree of names"))

    def with_answer(self, leaf: Any, answer: Any) -> Any:
        """Return the answer about a leaf; a Variable holds it, as in flax.nnx."""
        return leaf.replace(answer) if self.of(leaf) == "variable" else answer

    def array_in(self, leaf: Any) -> Any:
        """Return the array that the names of a leaf belong to."""
        form = self.of(leaf)
        if form == "variable":
            return leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
        if form == "named":
            return leaf.array
        return leaf.value if form == "box" else leaf


def _no_names(leaf: Any, instead: str) -> str:
    """Word the message about a tree without names; `instead` is where they may stand."""
    return (
        "nothing in the tree has logical axis names; its first leaf is "
        f"{shown(leaf)}. Give {instead}, such as ('embed', 'mlp') for each array; or boxes or nnx "
        "Variables with names, before they are unboxed"
    )


class Unboxed(NamedTuple):
    """Tree without the boxes and Variables that give its arrays names."""

    tree: Any
    """The tree with an array in the place of each box and Variable."""
    leaves: list[Any]
    """The boxes, Variables and other leaves of the tree that was given."""
    names: list[Any]
    """Of each of these leaves its logical axis names; None for one without."""
    treedef: Any
    forms: NodeForms

    def names_of_arrays(self) -> list[Any]:
        """Return the names of each array; a box may hold several, such as a quantized one."""
        from jax import tree_util

        subtrees = self.treedef.flatten_up_to(self.tree)
        if tree_util.all_leaves(subtrees):  # most often, and ten times as fast
            return self.names
        pairs = zip(self.names, map(tree_util.tree_leaves, subtrees), strict=True)
        return [names for names, arrays in pairs for _ in arrays]

    def boxed(self, answers: Any) -> Any:
        """Return the tree of answers, with those about a Variable in the Variable, as flax.nnx."""
        here = self.treedef.flatten_up_to(answers)
        return self.treedef.unflatten(map(self.forms.with_answer, self.leaves, here))


def open_boxes(tree: Any) -> Unboxed:
    """Take the arrays of a tree, and their names, out of boxes, Variables and NamedArrays."""
    from jax import tree_util

    forms = NodeForms()
    leaves: list[Any]
    treedef: Any
    leaves, treedef = tree_util.tree_flatten(tree, is_leaf=forms.holds_array)
    names = [forms.names_of(leaf) if forms.holds_array(leaf) else None for leaf in leaves]
    return Unboxed(treedef.unflatten(map(forms.array_in, leaves)), leaves, names, treedef, forms)


def unboxed(tree: Any) -> Unboxed:
    """Open the boxes of a tree for rules that decide all of it.

    Raises:
        ValueError: A Variable has sharding_rules of its own, which those rules would not meet.
    """
    boxes = open_boxes(tree)
    for leaf in boxes.leaves:
        is_variable = boxes.forms.of(leaf) == "variable"
        if is_variable and (rules := leaf.get_metadata().get("sharding_rules")):
            raise ValueError(
                f"an nnx Variable with the names {shown(variable_sharding(leaf))} has "
                f"sharding_rules of its own, {shown(rules)}: give all rules in one LogicalRules, "
                "and leave sharding_rules out; or give flax.nnx.get_partition_spec(state), which "
                "applies them, in place of rules"
            )
    return boxes


def unboxed_with_names(tree: Any) -> Unboxed:
    """Open the boxes of a tree as `unboxed`, and refuse a tree without names."""
    boxes = unboxed(tree)
    if boxes.leaves and all(entry is None for entry in boxes.names):
        raise TypeError(_no_names(boxes.leaves[0], "names="))
    return boxes
