"""Words for the reasons for which a program moves an array, and what to do about each."""

from __future__ import annotations

from typing import Final, NamedTuple


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
