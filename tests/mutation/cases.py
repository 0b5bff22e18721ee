"""Real pairs of a model and rules, on several meshes; those that check clean are what slips are made in.

A list is cut to the rules that its model has a use for: rules for other models are dead, which is a
warning of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import jax

import shardrules as sr
from shardrules._base.specs import entries_of, entry_axes
from tests.mutation.models import MODELS
from tests.mutation.slips import Case
from tests.support import corpus

_LLAMA: Final = (
    "EasyLM__llama", "LWM__llama-scan_layersFalse", "LWM__vision_llama-scan_layersFalse", "felafax__llama3_jax",
)  # fmt: skip
_FSDP: Final = ("easydel__palm-PalmConfig-fsdp-v0.0.80", "easydel__gemma-GemmaConfig-fsdp-v0.0.69")

TUNED: Final = {
    "easydel-deepseek-v3": (
        "easydel__deepseek_v3-DeepseekV3Config-v0.2.0", "easydel__kimi_linear-KimiLinearConfig-v0.2.0", *_FSDP,
    ),
    "easydel-mixtral-8x22b": (
        "easydel__arctic-ArcticConfig-v0.0.80", "easydel__minimax-MiniMaxConfig-v0.2.0", "easydel__mixtral-MixtralConfig-v0.1.4",
    ),
    "easylm-llama-3.1-405b": _LLAMA,
    "easylm-llama-3.1-405b-trainstate": _LLAMA[:1],
    "lwm-7b-unscanned": _LLAMA,
    "lwm-7b-scanned": ("LWM__llama-scan_layersTrue", *_LLAMA[:2]),
    "flax-gpt-j-6b": (
        "EasyLM-yizhongw__gptj", "JAXSeq__gptj", "easydel__gpt_j-GPTJConfig-v0.2.0", *_FSDP,
    ),
    "flax-t5-v1_1-xxl": ("JAXSeq__T5", *_FSDP),
    "flax-whisper-large-v3": ("easydel__whisper-WhisperConfig-v0.2.0", *_FSDP),
    "flax-vit-base-patch16-224": _FSDP,
}  # fmt: skip
"""The pairs on which the checks were made."""

HELD_OUT: Final = {
    "qwen3-235b-a22b": ("easydel__qwen3_moe-Qwen3MoeConfig-v0.2.0",),
    "qwen3-32b": ("easydel__qwen3_moe-Qwen3MoeConfig-v0.2.0", "easydel__smollm3-SmolLM3Config-v0.2.0", "easydel__exaone4-Exaone4Config-v0.2.0"),
    "gemma-3-27b": ("easydel__gemma3-Gemma3TextConfig-v0.1.4",),
    "gpt-oss-120b": ("easydel__gpt_oss-GptOssConfig-v0.2.0",),
    "falcon-40b": ("easydel__falcon-FalconConfig-v0.1.4",),
    "mamba-2.8b": ("easydel__mamba-MambaConfig-v0.2.0",),
    "gpt-neox-20b": ("easydel__gpt_neox-GPTNeoXConfig-v0.1.4",),
    "command-r7b": ("easydel__cohere2-Cohere2Config-v0.2.0", "easydel__llama-LlamaConfig-v0.1.4"),
    "phi-3-medium": ("easydel__phi3-Phi3Config-v0.1.4",),
    "mpt-30b": ("easydel__mosaic_mpt-MptConfig-v0.2.0",),
    "gemma-7b-keras": ("keras-hub__gemma",),
    "llama-3-8b-scalax": ("scalax__llama_fsdp_tp",),
}  # fmt: skip
"""Pairs that no check was tuned on."""

_DIALECTS: Final = {
    "EasyLM": sr.dialects.EASYLM, "EasyLM-yizhongw": sr.dialects.EASYLM, "LWM": sr.dialects.EASYLM, "felafax": sr.dialects.EASYLM, "scalax": sr.dialects.EASYLM,
    "JAXSeq": sr.dialects.KEYSTR, "keras-hub": sr.dialects.KERAS,
}  # fmt: skip
# An axis has the first of its names here that a size is for.
_SIZES: Final = (
    {"fsdp": 8, "tp": 4},
    {"fsdp": 64, "tp": 8, "dp": 2},
    {"fsdp": 16},
    {"fsdp": 4, "sp": 2, "ep": 2, "tp": 2},
)
_ALIASES: Final = {"mp": "tp", "model": "tp", "data": "fsdp", "batch": "fsdp"}
# Rules for single layers on stacked ones.
_STACKS: Final = {("lwm-7b-scanned", name): ("transformer/h/scan_decoder",) for name in _LLAMA}


def cases(pairs: dict[str, tuple[str, ...]]) -> Iterator[Case]:
    """Each pair on each mesh."""
    for model, names in pairs.items():
        tree = MODELS[model].tree() if model in MODELS else _real_tree(model)
        for name in names:
            for sizes in _SIZES:
                yield _case(model, tree, name, sizes)


def _real_tree(model: str) -> Any:
    return corpus.manifest(model).nested(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype))


def _case(model: str, tree: Any, name: str, sizes: dict[str, int]) -> Case:
    rules = corpus.rules(name)
    dialect = _DIALECTS.get(name.split("__")[0], sr.dialects.EFORMER)
    if dialect is sr.dialects.KERAS:  # which wants full matches now; the lists are of when it searched
        rules = [(f".*{pattern}.*", spec) for pattern, spec in rules]
    stacks = _STACKS.get((model, name), ())
    case = Case(f"{model} + {name}", tree, tuple(rules), dialect, _mesh(rules, {}), stacks)
    coverage = case.plan().coverage
    idle = {*coverage.dead, *(coverage.shadowed.keys() - {len(rules) - 1})}
    kept = tuple(rule for index, rule in enumerate(rules) if index not in idle)
    return replace(case, rules=kept, mesh=_mesh(kept, sizes))


def _mesh(rules: Iterable[Any], sizes: dict[str, int]) -> dict[str, int]:
    """The axes that the rules name, and dp if it has a size."""
    named = dict.fromkeys(a for _, spec in rules for e in entries_of(spec) for a in entry_axes(e))
    mesh = {axis: sizes.get(_ALIASES.get(axis, axis), 1) for axis in named}
    return mesh | ({"dp": sizes["dp"]} if "dp" in sizes else {})
