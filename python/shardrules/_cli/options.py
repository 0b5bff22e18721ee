"""Arguments and options that several commands have, as decorators, and records of groups."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import click

from shardrules._cli import types
from shardrules._cli.command import Decorator, argument, bundle, option

# Names of dialects, tables, memories and devices are text here, which tests compare: help imports
# no modules that have them.
DEVICES: Final = (
    "v5p:8x8x8, v5e:4x4, v6e:16x16, v4:4x4x4, tpu7x:4x4x4, or as clouds have it v5p-1024; or GPUs "
    "of a host, and hosts: h100:8x16, h200:8, b200:8x2, gb200:72x2"
)
MOMENTS: Final = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}
"""Optimizers, with the number of moments that each keeps per parameter."""
Sizes = dict[str, int]
"""Devices per mesh axis."""

model = functools.partial(argument, "model", metavar="SOURCE", type=types.FILE)
of_model: Final = model(
    about="The model: a safetensors file, index or directory; a JSON manifest, also gzipped; - for "
    "a manifest on standard input; or package.module:function, which returns a tree."
)
of_step: Final = argument(
    "function", metavar="FUNCTION",
    about="package.module:function, which takes the mesh and, with --rules, the rules, and returns "
    "(step, arguments, outputs) or (step, arguments), as shardrules.prove takes them.",
)  # fmt: skip
mesh = functools.partial(option, "-m", "--mesh", type=types.MESH)
of_mesh: Final = mesh(required=True, help="Devices per mesh axis, such as dp=8,fsdp=16,tp=4.")
rules = functools.partial(option, "-r", "--rules", type=types.FILE, multiple=True)
of_step_rules: Final = rules(help="Rules that the function takes behind the mesh.")
devices = functools.partial(option, "--devices", type=types.Number(min=1))
axes = functools.partial(option, "--axes", type=types.AXES)
on = functools.partial(option, "--on", metavar="TOPOLOGY", type=types.TOPOLOGY)
slices: Final = option(
    "--slices", type=types.Number(min=1), default=1, needs=("on",),
    help="Slices of TPUs, which the data centre's network connects.",
)  # fmt: skip
hbm = functools.partial(option, "--hbm", type=types.MEMORY)
of_one_device: Final = hbm(
    help="Memory of one device, such as 96GB or 80GiB, or its name, such as v5p."
)
dialect: Final = option(
    "--dialect", type=types.DIALECT,
    help="Semantics of the rules: big_vision, easylm, eformer, jaxseq, keras, nnx, spectrax; of "
    "logical rules linen, flax.core, maxtext, haliax. Default: the rule file's dialect, or else "
    "eformer, linen or, in YAML, maxtext.",
)  # fmt: skip
max_memory: Final = option(
    "--max-memory", type=types.BYTES, default="512MiB",
    help="Maximum memory for reading a file, beyond the file's size, such as 2GB.",
)  # fmt: skip
head_dim: Final = option(
    "--head-dim", type=types.Number(min=1),
    help="Size of an attention head. Default: that of a q_norm or k_norm, if there is one.",
)  # fmt: skip
fail_on: Final = option(
    "--fail-on", type=click.Choice(["error", "warning", "info", "never"]), default="error",
    help="Minimum level that makes the exit code 1.",
)  # fmt: skip


def formats(*names: str, about: str = "Output format.") -> Decorator:
    """Make a decorator with the formats, of which the first is the default."""
    choice = click.Choice(names)
    return option("--format", type=choice, default=names[0], in_job=False, help=about)


class HowToPlan(NamedTuple):
    """How a model is planned, beside its mesh."""

    rules: tuple[str, ...]
    dialect: Any
    max_memory: int


def how_to_plan(*, needs_rules: bool = True) -> Decorator:
    """Make a decorator with what says how a model is planned."""
    of_model = rules(required=needs_rules, help="The rules: a TOML or JSON file, MaxText's YAML, "
        "or package.module:NAME; files after the first are merged over it.")  # fmt: skip
    return bundle(HowToPlan, "how", of_model, dialect, max_memory)


def moments(optimizer: str | None, dtype: str) -> tuple[str, ...] | None:
    """Return the dtypes of an optimizer's moments; None if there is none."""
    return None if optimizer is None else (dtype,) * MOMENTS[optimizer]


optimizer = functools.partial(
    option, "--optimizer", type=click.Choice([*MOMENTS]), help="Count the state of this optimizer."
)
optimizer_dtype: Final = option(
    "--optimizer-dtype", type=types.DTYPE, default="float32", needs=("optimizer",),
    help="The dtype of the optimizer's moments.",
)  # fmt: skip


class ToCount(NamedTuple):
    """What training adds to the parameters, and the memory that there is."""

    gradients: str | bool | None
    optimizer: str | None
    optimizer_dtype: str
    hbm: int | None

    @property
    def training(self) -> dict[str, Any]:
        """Arguments of `Plan.bytes_per_device`."""
        dtypes = moments(self.optimizer, self.optimizer_dtype)
        return {"gradients": self.gradients, "optimizer": dtypes}


def memory(*needs: str) -> Decorator:
    """Make a decorator with what is counted, which needs one of these options."""
    return bundle(
        ToCount, "memory",
        option("--gradients", type=types.DTYPE_OR_SAME, needs=needs,
            help="Count gradients of this dtype; 'same' is the parameters' own dtypes."),
        optimizer(needs=needs),
        optimizer_dtype,
        of_one_device,
    )  # fmt: skip
