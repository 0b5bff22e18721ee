"""The arguments and options that several commands share, with their help.

Must not know what a command does with them.
"""

from __future__ import annotations

from typing import Annotated, Final

from shardrules._cli.arguments import Argument, Option
from shardrules._cli.inputs import MOMENTS
from shardrules._correction import MEMORY_KINDS
from shardrules._files.logical import LOGICAL_DIALECTS
from shardrules._files.rules import DIALECTS, TABLES
from shardrules._io import DEFAULT_MEMORY
from shardrules._rules.dialects import EFORMER, LINEN, MAXTEXT

__all__ = [
    "MAX_MEMORY",
    "AxesOverDcn",
    "Companions",
    "DialectName",
    "ExpertsPerToken",
    "FailOn",
    "FindingsFormat",
    "Gradients",
    "HardwareName",
    "Hbm",
    "HeadDim",
    "HostMemory",
    "MaxMemory",
    "Mesh",
    "MinSize",
    "NoFallbacks",
    "Optimizer",
    "OptimizerDtype",
    "OptimizerMemory",
    "RulesFile",
    "Source",
    "Stacked",
    "Tokens",
]

MAX_MEMORY: Final = f"{DEFAULT_MEMORY >> 20}MiB"
"""The default of --max-memory."""

Source = Annotated[
    str,
    Argument(
        help="The model: a safetensors file, index or directory; an orbax checkpoint; a JSON "
        "manifest, also gzipped; - for a manifest on standard input; or package.module:function, "
        "which returns a tree. plan, check and explain take a lock too."
    ),
]
RulesFile = Annotated[
    str,
    Option(
        "--rules",
        "-r",
        help="The rules: a TOML or JSON file, MaxText's YAML, or package.module:NAME. Needed for a "
        "model.",
    ),
]
Mesh = Annotated[
    str,
    Option(
        "--mesh",
        "-m",
        help="Devices per mesh axis, such as dp=8,fsdp=16,tp=4. Needed for a model.",
    ),
]
DialectName = Annotated[
    str | None,
    Option(
        "--dialect",
        help=f"Semantics of the rules: {', '.join(sorted(DIALECTS))}; of logical rules "
        f"{', '.join(LOGICAL_DIALECTS)}. Default: the rule file's "
        f"dialect, or else {EFORMER.name}, {LINEN.name} or, in YAML, {MAXTEXT.name}.",
    ),
]
MinSize = Annotated[int, Option(min=0, help="Replicate leaves with fewer elements.")]
MaxMemory = Annotated[
    str,
    Option(help="Maximum memory for reading a file, beyond the file's size, such as 2GB."),
]
NoFallbacks = Annotated[
    bool,
    Option(
        "--no-fallbacks",
        help="Refuse patterns that only Python's backtracking `re` can match, path by path.",
    ),
]
Gradients = Annotated[
    str | None,
    Option(help="Count gradients of this dtype; 'same' is the parameters' own dtypes."),
]
Optimizer = Annotated[
    str | None,
    Option(help=f"Count the state of this optimizer: {', '.join(MOMENTS)}."),
]
OptimizerDtype = Annotated[
    str | None, Option(help="The dtype of the optimizer's moments. Default: float32.")
]
Stacked = Annotated[
    list[str] | None,
    Option(
        help="Path of a stack of layers, for rules of single layers; repeatable. Beside those of "
        "the rule file."
    ),
]
Companions = Annotated[
    str | None,
    Option(help=f"Leaves that follow others: {', '.join(TABLES)}. Beside those of the rule file."),
]
OptimizerMemory = Annotated[
    str | None,
    Option(
        help=f"The memory of the optimizer's moments: {', '.join(MEMORY_KINDS)}. Default: that of "
        "their parameters."
    ),
]
HeadDim = Annotated[
    int | None,
    Option(
        min=1,
        help="Size of an attention head. Default: that of a q_norm or k_norm, if there is one.",
    ),
]
Hbm = Annotated[str | None, Option(help="Memory of one device, such as 96GB or 80GiB.")]
HostMemory = Annotated[
    str | None, Option(help="The host's memory for each of its devices, such as 256GB.")
]
FindingsFormat = Annotated[str, Option("--format", help="Output format: text, json or github.")]
FailOn = Annotated[
    str,
    Option(help="Minimum level that makes the exit code 1: error, warning, info, never."),
]
Tokens = Annotated[int | None, Option(min=1, help="Tokens of a step, to estimate its time.")]
HardwareName = Annotated[
    str | None,
    Option(
        "--hardware",
        help="The devices: v4, v5e, v5p, v6e, 7x, A100, H100, H200, B200; or a TOML file. Without "
        "--hbm, their memory counts.",
    ),
]
AxesOverDcn = Annotated[str | None, Option(help="Mesh axes between slices or nodes, such as dp.")]
ExpertsPerToken = Annotated[
    int | None, Option(min=1, help="Experts of a layer that each token is sent to.")
]
