"""Words in paths and names of mesh axes, as the field's libraries write them: two tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from shardrules._plan.fold import Folded


@dataclass(frozen=True, eq=False)
class Words:
    """Words in paths that say one thing, in small letters."""

    regex: str

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        """Most rows of the table are for `suggest`, and not compiled before."""
        return re.compile(self.regex)

    def is_name(self, word: str) -> bool:
        """Tell if the whole word is one of these."""
        return self._compiled.fullmatch(word) is not None

    def are_in(self, *words: str) -> bool:
        """Tell if these stand in any of the words."""
        return any(map(self._compiled.search, words))


# Names of an array within its module, and of modules that say nothing.
ARRAY: Final = Words(r"kernel|weight|w|value|embedding|param|bias|b|scale")
NEUTRAL: Final = Words(r"dense|linear|layer|base_layer|projection")
NORM: Final = Words(r"norm|(^|_)ln(_|$)")
VECTOR: Final = Words(r"bias|scale|norm|gamma|beta|(^|_)ln(_|$)|(^|_)b$")
LOOKUP: Final = Words(r"embed|wte|wpe|vocab")
NO_LOOKUP: Final = Words(r"patch|proj|unembed|head|conv")
EXPERTS: Final = Words(r"experts?(_|$)|moe")
NO_EXPERTS: Final = Words(r"shared|att")
ROUTER: Final = Words(r"(\w*_)?(router|gate|gating|switch|w_?[gr])(_\w*)?")
STACK: Final = Words(r"\w*layers?|stack\w*|stages?|repeats?|blocks?|periods?")
# Projections from the residual stream, and back to it.
READS: Final = Words(
    r"(to_)?w?q(kv)?(_.*)?|(to_)?w?kv?(_.*)?|(to_)?w?v(_proj)?|query.*|key.*|value.*|c_attn|in_proj.*|gate.*|up(_.*)?"
    r"|w[13]|wi(_.*)?|fc1|fc_in|c_fc|dense_h_to_4h|intermediate|lm_head|head|logits.*|router|classifier"
)
WRITES: Final = Words(
    r"w?o(_proj)?|(to_)?out(_.*)?|output|down(_.*)?|w2|fc2|fc_out|(c_)?proj|dense_4h_to_h|attn_out"
    r"|mlp_out|attn_vec.*|linear2|(self_?)?att(n|ention)"
)
ATTENTION: Final = Words(
    r"w?(q|k|v|o|qk|kv|qkv)(_.*)?|query.*|key.*|value.*|c_attn|.*att(n|ention).*"
)
IN_ATTENTION: Final = Words(r"att(n|ention)")
# Of these names, the one that MLPs and experts have as well.
BACK: Final = Words(r"w?o(_.*)?")
KEYS: Final = Words(r"(to_)?w?(k|v|kv)(_(proj|einsum))?|(key|value)(_proj)?")
# To the latent space of DeepSeek's attention, where a norm needs all of a token's elements.
TO_LATENT: Final = Words(r"(linear_)?w?(q|kv|qkv)_(a|down)(_\w+)?")
# Projections to heads of attention, and from them; norms of single heads.
TO_HEADS: Final = Words(
    r"(to_)?([qkv]|query|key|value)(_proj)?|w[qkv]|(w_?)?qkv(_proj)?|query_key_value|c_attn"
)
FROM_HEADS: Final = Words(r"o|out|o_proj|out_proj|wo|to_out|attention_output|c_proj|dense")
HEAD_NORM: Final = Words(r"([qk]|query|key)_(layer_?)?norm")
# Kernels of attention with several outputs, by how many; others have heads there.
FUSED: Final = (
    (3, Words(r"\w*qkv\w*|query_key_value|c_attn|in_proj\w*")),
    (2, Words(r"\w*kv\w*|key_value\w*")),
)
# The words of a path; sets of numbers belong to the word around them.
COMPONENT: Final = re.compile(r"(?:\{[^{}]*\}|[^/.\[\]'])+")
_SET: Final = re.compile(r"\{[^{}]*\}")


def components_of(folded: Folded) -> list[str]:
    """Return the components of a folded path, with their sets of numbers.

    The `value` of flax nnx is left out behind the name of an array.
    """
    components = COMPONENT.findall(folded.pattern) or [folded.pattern]
    if len(components) > 1 and components[-1].lower() == "value":
        before = components[-2].lower()
        return components[:-1] if ARRAY.is_name(before) or VECTOR.are_in(before) else components
    return components


def words_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return components in small letters, # for their sets of numbers."""
    return tuple([_SET.sub("#", component).lower() for component in components])


AxisUse = Literal["fsdp", "tensor", "experts", "data", "layers"]
"""Cuts weights that are gathered whole before use; cuts what is computed with; cuts stacks of
experts; cuts batches and sequences alone; or cuts stacks of layers, as the stages of a pipeline."""

# Of t5x, big_vision, EasyLM, EasyDeL, MaxText, axlearn, levanter and openpi.
_USES: Final[dict[str, AxisUse]] = {
    **dict.fromkeys(("tp", "tensor", "model", "mp", "mdl", "autoregressive"), "tensor"),
    **dict.fromkeys(("ep", "expert", "experts"), "experts"),
    **dict.fromkeys(("fsdp", "zero"), "fsdp"),
    **dict.fromkeys(("data", "dp", "ddp", "batch", "dcn", "diloco"), "data"),
    **dict.fromkeys(("replica", "replicas", "sp", "cp", "seq", "sequence", "context"), "data"),
    **dict.fromkeys(("stage", "stages", "pp", "pipe", "pipeline"), "layers"),
}
# Numbers of names.
_NUMBER: Final = re.compile(r"[0-9]+$")


def use_of(axis: str) -> AxisUse | None:
    """Return the use that the first word of its name with one tells; None if none does."""
    words = (_NUMBER.sub("", word) for word in axis.lower().split("_"))
    return next((_USES[word] for word in words if word in _USES), None)


def uses_of(axes: Iterable[str]) -> dict[str, AxisUse]:
    """Return the use of each axis of a mesh. One of another name cuts weights, as fsdp does.

    If none cuts weights by its name, the first of those for batches does, as big_vision's and
    openpi's `data` do.
    """
    uses: dict[str, AxisUse] = {axis: use_of(axis) or "fsdp" for axis in axes}
    if uses and {*uses.values()} == {"data"}:
        uses[next(iter(uses))] = "fsdp"
    return uses


def is_gathered(axis: str) -> bool:
    """Tell if devices surely gather the weights that the axis cuts before they use them."""
    return use_of(axis) in ("fsdp", "data")


def data_axes_among(axes: Iterable[str]) -> tuple[str, ...]:
    """List the axes that split the tokens of a batch: not those of tensors and stages.

    Those of experts do, as in MaxText, in all that is no expert.
    """
    uses = uses_of(axes)
    return tuple(axis for axis, use in uses.items() if use not in ("tensor", "layers"))
