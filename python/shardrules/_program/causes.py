"""The reasons for which a program moves an array: which applies, in words, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shardrules._program.reasons import Row


class Cause(NamedTuple):
    """Reason for which a program moves an array."""

    text: str
    fix: str = ""
    """What to do about it, with places for {spec}, {line} and {axes}; "" if it is expected."""

    @property
    def is_expected(self) -> bool:
        return not self.fix


REASONS: Final[dict[str, Cause]] = {
    "gather": Cause("a planned array, gathered where it is used"),
    "layer": Cause("a planned array, gathered where it is used"),
    "loop": Cause(
        "a planned array, gathered before a loop, which holds it whole while it runs",
        "gather within the loop, a layer at a time: constrain the layer's slice inside its body, "
        "and keep XLA from moving the gather out",
    ),
    "same work": Cause(
        "a planned array, gathered though what it is multiplied by is not cut by all of these "
        "axes: devices along them do the same work",
        "constrain the activations so that they are cut by these axes, and the product is computed "
        "in parts; or cut the batch by them",
    ),
    "anew": Cause(
        "a planned array, gathered in each trip of a loop, though it is the same in all of them",
        "gather it once: constrain it to be whole over these axes before the loop",
    ),
    "wide": Cause(
        "a planned array, gathered after it is converted or scaled: the copies are of a wider "
        "dtype than what is stored",
        "gather what is stored: constrain the stored values, and their scales, to be whole along "
        "these axes before they are converted",
    ),
    "all experts": Cause(
        "a planned array, gathered though these axes cut experts: each device gets all experts",
        "send tokens to their experts instead: by jax.lax.all_to_all in a shard_map, or constrain "
        "what experts get to be cut as they are; if the axes are for FSDP, cut another dimension",
    ),
    "copy": Cause("an argument, moved"),
    "gradient": Cause("a gradient, summed over the batch"),
    "state": Cause("a state, or its gradient, sharded along another dimension"),
    "update": Cause("a new state, gathered as it is returned"),
    "partial": Cause("sums that devices compute in parts"),
    "parts": Cause("moved for products that devices compute in parts"),
    "experts": Cause("tokens, exchanged between experts"),
    "rows": Cause("rows of a planned table, looked up by number"),
    "called": Cause("called by the program, in shard_map"),
    "optimizer": Cause("an array of the optimizer, sharded otherwise where it is used"),
    "small": Cause("too little to ask why, such as statistics"),
    "table": Cause(
        "a planned table, gathered for a few of its rows",
        "look the rows up in the table as it is sharded: leave it without a constraint{line}; or "
        "plan it to be whole over {axes}",
    ),
    "moved": Cause(
        "an argument, sharded otherwise where it is used",
        "plan it to be sharded as it is used{line}",
    ),
    "back": Cause("sent back to where it came from", "leave out both transfers{line}"),
    "microbatch": Cause(
        "a gradient, summed in every micro-batch",
        "sum the gradients of the micro-batches on each device, and over devices once behind the "
        "loop: let the accumulator be sharded as the sums are before they are reduced",
    ),
    "whole gradient": Cause(
        "a gradient, made whole though its parameter is sharded",
        "constrain the gradients to be sharded as their parameters: "
        "jax.lax.with_sharding_constraint(gradients, plan.shardings())",
    ),
    "cache": Cause(
        "a state, gathered though it is sharded, or only a part of it is new",
        "constrain the state inside the function to be sharded as it comes in, and what is "
        "computed with it to be sharded by the same axes",
    ),
    "batch": Cause(
        "an activation, moved along an axis that shards the batch",
        "constrain the activations where they are made, so that XLA gathers the parameters in "
        "their place: jax.lax.with_sharding_constraint(x, {spec}){line}",
    ),
    "alike": Cause(
        "an activation, gathered, and then used alike on all devices",
        "let what comes behind be computed in parts: constrain the array, and what is made of it, "
        "to be sharded by {axes}{line}",
    ),
    "reshard": Cause(
        "an activation, sharded otherwise and back",
        "constrain both sides alike{line}: the array is sharded in another way and back, and "
        "multiplied in between with nothing",
    ),
    "summed": Cause(
        "gathered along the dimension that a product sums",
        "let {axes} shard the other dimension of the kernel that this array{line} is multiplied "
        "by, along which it comes in parts: then only the result is summed",
    ),
    "turned": Cause(
        "sums of products that are larger than their factor, or whose factor each device has whole",
        "let {axes} shard the other dimension of the kernel{line}: then each device computes its "
        "part of the result, and nothing is summed",
    ),
    "early": Cause(
        "summed before products that make it smaller",
        "multiply first, and sum the smaller results{line}: write the product in another order, "
        "(x @ a) @ b in the place of x @ (a @ b)",
    ),
    "sliced": Cause(
        "made whole, though each device uses only one of the parts, or sums of them",
        "let each device send only the part that another one uses{line}, such as by "
        "jax.lax.ppermute, all_to_all or psum_scatter; or let what comes in be sharded by {axes}",
    ),
    "trips": Cause(
        "summed in each trip of a loop, with what is summed already",
        "keep on each device what it has computed{line}, and sum once behind the loop",
    ),
    "again": Cause(
        "equal on all devices before it is summed",
        "do not sum over {axes}{line}: all devices along it have the same array",
    ),
    "unknown": Cause(
        "nothing planned explains it",
        "look at the line{line}: slices, rolls and concatenations along a sharded dimension move "
        "data; or constrain the array to be sharded along another one",
    ),
}  # fmt: skip
"""Reasons by key."""

REASONS_BY_ARRAY: Final[Mapping[str, Sequence[tuple[str, Callable[[Row], bool]]]]] = {
    "argument": (
        ("gather", lambda row: row.is_ring),
        ("copy", lambda row: row.is_sum or (row.kind != "all-gather" and row.is_small)),
        ("moved", lambda row: row.kind != "all-gather"),
        ("sliced", lambda row: not row.is_small and row.is_sliced),
        ("table", lambda row: not row.is_small and row.is_for_rows),
        ("loop", lambda row: row.result in row.reasons.held),
        ("same work", lambda row: row.is_same_work),
        ("wide", lambda row: row.is_wide),
        ("all experts", lambda row: row.is_of_experts),
        ("layer", lambda row: row.layers > 1),
        ("anew", lambda row: row.is_anew),
        ("gather", lambda _: True),
    ),
    "sum": (
        ("whole gradient", lambda row: row.is_stacked),
        ("microbatch", lambda row: row.is_repeated),
        ("gradient", lambda row: row.is_batch),
        ("partial", lambda _: True),
    ),
    "gradient": (
        ("cache", lambda row: not row.is_training and row.is_of_shards),
        ("state", lambda row: not row.is_training),
        ("small", lambda row: row.is_small),
        ("whole gradient", lambda row: row.is_of_shards),
        ("gradient", lambda _: True),
    ),
    "state": (
        ("state", lambda row: row.kind == "all-to-all" and row.is_training),
        ("cache", lambda row: row.kind == "all-to-all"),
        ("cache", lambda row: row.is_of_shards and not row.is_training and row.is_written),
        ("gather", lambda row: row.result not in row.reasons.next_state_of),
        ("update", lambda row: row.kind != "all-gather"),
        ("cache", lambda row: row.is_of_shards or row.is_written or row.exchange.times != 1),
        ("update", lambda _: True),
    ),
    "all-reduce": (
        ("again", lambda row: not row.differs(row.operand)),
        ("sliced", lambda row: row.is_called and row.is_sliced),
        ("trips", lambda row: row.is_called and row.is_carried),
        ("called", lambda row: row.is_called),
        # Sums along other axes, of gradients of activations, are in no order that a user chose.
        ("early", lambda row: row.is_batch and row.is_early),
        # Sums along an axis of the batch without a kernel are of statistics, of gradients on their
        # way to a table, and of keys whose queries are on other devices.
        ("batch", lambda row: row.is_batch and row.has_planned_factor and not row.is_cheap),
        ("partial", lambda row: row.is_batch),
        ("turned", lambda row: row.has_planned_factor and (row.is_widened or row.is_of_whole)),
        ("partial", lambda _: True),
    ),
    "collective-permute": (
        ("back", lambda row: row.is_sent_back),
        ("called", lambda row: row.is_called),
        ("parts", lambda row: not row.op_name),
        ("batch", lambda row: row.is_batch),
        ("parts", lambda row: row.is_ring),
        ("unknown", lambda _: True),
    ),
    "all-to-all": (
        ("optimizer", lambda row: row.operand in row.reasons.behind_gradients),
        ("called", lambda row: row.is_called),
        ("experts", lambda row: row.axes <= row.reasons.expert_axes),
        ("parts", lambda row: row.is_batch and row.is_for_gradient),
        ("batch", lambda row: row.is_batch),
        ("parts", lambda row: bool(row.products)),
        ("reshard", lambda _: True),
    ),
    "all-gather": (
        ("parts", lambda row: row.is_ring and not row.is_batch),
        ("batch", lambda row: row.is_batch and not row.differing),
        ("sliced", lambda row: not row.differing and row.is_sliced),
        ("called", lambda row: row.is_called and not row.is_batch),
        ("alike", lambda row: not row.differing),
        ("summed", lambda row: not row.is_batch and row.is_along_sum),
        ("parts", lambda row: not row.is_batch or row.is_for_gradient),
        ("batch", lambda row: row.is_for_planned and not row.is_cheap),
        ("parts", lambda _: True),
    ),
}
"""Keys of reasons by what is moved, the first that applies; of an activation by the collective."""
