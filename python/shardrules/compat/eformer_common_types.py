"""`eformer.common_types` of eformer 0.0.101 to 0.1.0: the names that a `PartitionAxis` resolves.

Constants and composites are equal to eformer's; the two libraries do not recognise each other's
classes, so take those of one. eformer itself is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np

from shardrules._base.text import readable

__all__ = [
    "BATCH", "BIAS_HEAD_SEQ", "BIAS_KV_SEQ", "DATA_PARALLEL", "DEFAULT_MASK_VALUE", "DP",
    "EMBED", "EMPTY", "EMPTY_VAL", "EP", "EXPERT", "EXPERT_GATE", "EXPERT_PARALLEL", "FSDP",
    "FULLY_SHARDED_DATA_PARALLEL", "GENERATION_MODES", "HEAD", "HEAD_DIM", "KV_HEAD",
    "KV_HEAD_DIM", "KV_LENGTH", "LENGTH", "MLP_INTERMEDIATE", "MODE_DECODE", "MODE_INSERT",
    "MODE_PREFILL", "MODE_TRAIN", "NOT_GIVEN", "QUERY_LENGTH", "RUNTIME_MODE_TYPES",
    "SEQUENCE_PARALLEL", "SP", "TENSOR_PARALLEL", "TP", "VOCAB", "Array", "AttnKVSharding",
    "AttnQSharding", "AxisIdxes", "AxisNames", "AxisType", "ColumnWise", "DType",
    "DynamicShardingAxes", "ExpertActivations", "ExpertActivationsAlt", "ExpertColumnWise",
    "ExpertColumnWiseAlt", "ExpertRowWise", "ExpertRowWiseAlt", "ExpertTensorParallel",
    "HiddenStateSharding", "Mesh", "PRNGKey", "Replicated", "RowWise", "SColumnWise",
    "SRowWise", "Shape", "UnifiedExpertColumnWise", "UnifiedExpertRowWise",
]  # fmt: skip

Array = jax.numpy.ndarray
PRNGKey = jax.numpy.ndarray
DType = jax.numpy.dtype
Shape = Sequence[int]
Mesh = jax.sharding.Mesh
AxisNames = tuple[str, ...]
AxisIdxes = tuple[int, ...]
AxisType = tuple[str, ...] | str | Any | None


class _Empty:
    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __reduce__(self) -> str:
        return "NOT_GIVEN"  # one object in every process, for `is`


NOT_GIVEN: Final = _Empty()
"""Stands for an argument that was not given, where None means something."""
EMPTY_VAL: Final = _Empty

DEFAULT_MASK_VALUE: Final = -0.7 * float(np.finfo(np.float32).max)

# Dimensions of arrays.
EMPTY: Final = "_"
"""A dimension that is not sharded."""
BATCH: Final = "__BATCH__"
LENGTH: Final = "__LENGTH__"
KV_LENGTH: Final = "__KV_LENGTH__"
QUERY_LENGTH: Final = "__QUERY_LENGTH__"
EMBED: Final = "__EMBED__"
HEAD: Final = "__HEAD__"
KV_HEAD: Final = "__KV_HEAD__"
MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
VOCAB: Final = "__VOCAB__"
EXPERT: Final = "__EXPERT__"
EXPERT_GATE: Final = "__EXPERT_GATE__"
HEAD_DIM: Final = "__HEAD_DIM__"
KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"

# Kinds of parallelism.
DP = DATA_PARALLEL = "__DATA_PARALLEL__"
FSDP = FULLY_SHARDED_DATA_PARALLEL = "__FULLY_SHARDED_DATA_PARALLEL__"
TP = TENSOR_PARALLEL = "__TENSOR_PARALLEL__"
EP = EXPERT_PARALLEL = "__EXPERT_PARALLEL__"
SP = SEQUENCE_PARALLEL = "__SEQUENCE_PARALLEL__"

MODE_DECODE: Final = "__autoregressive__"
MODE_PREFILL: Final = "__prefill__"
MODE_TRAIN: Final = "__train__"
MODE_INSERT: Final = "__insert__"
GENERATION_MODES: Final = {MODE_DECODE, MODE_INSERT}
RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]


@readable
class DynamicShardingAxes(NamedTuple):
    """Names of an array's dimensions; the composites below are classes of this kind."""

    axes: Sequence[Any]
    mode: str | int
    """Or the number of a dimension: MODE_DECODE if its size is 1, else MODE_TRAIN."""


def _composite(
    name: str, axes: Sequence[Any], mode: str | int = MODE_TRAIN
) -> type[DynamicShardingAxes]:
    members = {"__doc__": f"{axes}, in the mode {mode}.", "__module__": __name__}
    return type(name, (DynamicShardingAxes,), {"axes": axes, "mode": mode, **members})


HiddenStateSharding = _composite("HiddenStateSharding", [BATCH, QUERY_LENGTH, EMBED], 1)
AttnQSharding = _composite("AttnQSharding", [BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], 1)
AttnKVSharding = _composite("AttnKVSharding", [BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM], 1)
RowWise = _composite("RowWise", [TP, [FSDP, SP]])
SRowWise = _composite("SRowWise", [TP])
ColumnWise = _composite("ColumnWise", [[FSDP, SP], TP])
SColumnWise = _composite("SColumnWise", [[FSDP, SP]])
Replicated = _composite("Replicated", [EMPTY])
ExpertColumnWise = _composite("ExpertColumnWise", [EP, FSDP, TP])
ExpertRowWise = _composite("ExpertRowWise", [EP, TP, FSDP])
ExpertColumnWiseAlt = _composite("ExpertColumnWiseAlt", [EP, [FSDP, SP], TP])
ExpertRowWiseAlt = _composite("ExpertRowWiseAlt", [EP, TP, [FSDP, SP]])
UnifiedExpertColumnWise = _composite("UnifiedExpertColumnWise", [[FSDP, SP, EP], EMPTY, TP])
UnifiedExpertRowWise = _composite("UnifiedExpertRowWise", [[FSDP, SP, EP], TP, EMPTY])
ExpertActivations = _composite("ExpertActivations", [DP, SP, EP, TP])
ExpertActivationsAlt = _composite("ExpertActivationsAlt", [DP, SP, [TP, FSDP]])
ExpertTensorParallel = _composite("ExpertTensorParallel", [TP, EMPTY, EMPTY])
