"""Options and arguments of all commands: in groups, by name, each with its flags and help."""

from __future__ import annotations

from typing import Any, Final

MOMENTS: Final = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}
"""Optimizers, with the number of moments that each keeps per parameter."""

# (flags and value, help, defaults): a value such as FILE, {one,of,these} or several...; no value
# for a flag, no flags for an argument; a NUMBER has a least one. Names of dialects, tables,
# memories and devices are text here, which tests compare: help imports no modules that have them.
GROUPS: Final[dict[str, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "Arguments": {
        "source": ("SOURCE", "The model: a safetensors file, index or directory; an orbax "
            "checkpoint; a JSON manifest, also gzipped; - for a manifest on standard input; or "
            "package.module:function, which returns a tree.", {}),
        "path": ("PATH", "The path of the array; or what several arrays that are alike have in "
            "common: a folded path, a glob such as 'layers/*/wq', or the end of their paths.", {}),
        "function": ("FUNCTION", "package.module:function of the step.", {}),
        "array": ("--array PATH", "Say of this argument alone what the step does with its "
            "dimensions.", {}),
        "on": ("--on TOPOLOGY", "The devices to compile for: v5p:8x8x8, v5e:4x4, v6e:16x16, "
            "v4:4x4x4, tpu7x:4x4x4, or as clouds have it v5p-1024; or GPUs of a host, and hosts: "
            "h100:8x16, h200:8, b200:8x2, gb200:72x2.", {"required": True}),
        "slices": ("--slices NUMBER", "Slices of TPUs, which the data centre's network connects.",
            {"least": 1, "default": 1}),
        "tries": ("--try CHOICE...", "A keyword of the function of a step, and its values, such as "
            "batch=256,512,1024 or remat=true,false; repeatable, and all are tried with all.", {}),
        "time": ("--time", "Compile the step to its end, which takes minutes for a large one, and "
            "add the time that the compiler expects.", {}),
        "axis_types": ("--axis-types TYPES", "Types of the mesh axes, one for all or one for each: "
            "auto, explicit.", {"default": "auto"}),
        "time_limit": ("--time-limit SECONDS", "Seconds after which the best so far is taken, with "
            "its gap.", {"least": 1}),
        "project": ("--project FILE", "Without arguments, run the jobs of this project file, "
            "whoever owns it, and import what they name as package.module:function. Default: the "
            "file in the current folder, or the nearest above it.", {}),
        "before": ("BEFORE", "A lockfile or a model.", {}),
        "after": ("AFTER", "A lockfile or a model.", {}),
    },
    "Plan": {
        "rules": ("-r --rules FILE", "The rules: a TOML or JSON file, MaxText's YAML, or "
            "package.module:NAME. Needed for a model.", {}),
        "mesh": ("-m --mesh MESH", "Devices per mesh axis, such as dp=8,fsdp=16,tp=4. Needed for a "
            "model.", {}),
        "devices": ("--devices NUMBER", "Choose a mesh of this many devices.", {"least": 1}),
        "axes": ("--axes AXES", "Axes of the chosen mesh, such as fsdp,tp. Default: fsdp,tp, and "
            "ep if there are stacks of experts.", {}),
        "dialect": ("--dialect NAME", "Semantics of the rules: big_vision, easylm, eformer, "
            "jaxseq, keras, nnx, spectrax; of logical rules linen, "
            "flax.core, maxtext, haliax. Default: the rule file's dialect, or else eformer, linen "
            "or, in YAML, maxtext.", {}),
        "like": ("--like FILE", "A rule file to mend: its rules that decide arrays stay, and "
            "others are added.", {}),
        "stacked": ("--stacked PATH...", "Path of a stack of layers, for rules of single layers; "
            "repeatable. Beside those of the rule file.", {}),
        "companions": ("--companions NAMES", "Leaves that follow others: lora, quantized. Beside "
            "those of the rule file.", {}),
        "min_size": ("--min-size NUMBER", "Replicate leaves with fewer elements.",
            {"least": 0, "default": 0}),
        "head_dim": ("--head-dim NUMBER", "Size of an attention head. Default: that of a q_norm or "
            "k_norm, if there is one.", {"least": 1}),
    },
    "Reading": {
        "max_memory": ("--max-memory BYTES", "Maximum memory for reading a file, beyond the file's "
            "size, such as 2GB.", {"default": "512MiB"}),
        "no_fallbacks": ("--no-fallbacks", "Refuse patterns that only Python's backtracking `re` "
            "can match, path by path.", {}),
    },
    "Memory": {
        "gradients": ("--gradients DTYPE", "Count gradients of this dtype; 'same' is the "
            "parameters' own dtypes.", {}),
        "optimizer": (f"--optimizer {{{','.join(MOMENTS)}}}", "Count the state of this optimizer.",
            {}),
        "optimizer_dtype": ("--optimizer-dtype DTYPE", "The dtype of the optimizer's moments. "
            "Default: float32.", {}),
        "optimizer_memory": ("--optimizer-memory {device,pinned_host,unpinned_host}", "The memory "
            "of the optimizer's moments. Default: that of their parameters.", {}),
        "hbm": ("--hbm BYTES", "Memory of one device, such as 96GB or 80GiB, or its name, such as "
            "v5p.", {}),
        "host_memory": ("--host-memory BYTES", "The host's memory for each of its devices, such as "
            "256GB.", {}),
        "must_fit": ("--must-fit", "Exit with 1 if the bytes do not fit into --hbm.", {}),
    },
    "Time of a step": {
        "hardware": ("--hardware NAME", "The devices of --mesh, without --on: v4, v5e, v5p, v6e, "
            "7x, A100, H100, H200, B200, GB200; or a TOML file.", {}),
    },
    "Findings": {
        "fail_on": ("--fail-on {error,warning,info,never}", "Minimum level that makes the exit "
            "code 1.", {"default": "error"}),
        "large": ("--large BYTES", "Minimum bytes per device for a replicated leaf to be a "
            "warning.", {"default": "16MiB"}),
        "replicated": ("--replicated PATTERN...", "Pattern of paths that are replicated on "
            "purpose; repeatable.", {}),
        "optional_axes": ("--optional-axes AXES", "Axes of the rules that a mesh may lack, such as "
            "sp,ep.", {}),
        "data_axes": ("--data-axes AXES", "Mesh axes that shard only batches, and no leaf, such as "
            "dp.", {}),
        "budget": ("--budget WHAT=BYTES...", "Maximum bytes that a device sends in a step, over a "
            "mesh axis (fsdp=25GB), by a kind of collective (all-gather=20GB) or in all "
            "(total=40GB), or needs at once (peak=90GB); repeatable.", {}),
        "level": ("--level KIND=LEVEL...", "Level for a kind of finding: dead=off, siblings=error; "
            "repeatable.", {}),
        "fix": ("--fix", "Print the rules that are missing, instead of findings: as a patch of a "
            "TOML file, or to paste into another. Exits with 1 if there are some.", {}),
    },
    "Output": {
        "format": ("--format {text,json}", "Output format.", {"default": "text"}),
        "lock": ("--lock FILE", "Write a lockfile to this path.", {}),
        "update_lock": ("--update-lock", "Write the file of --lock, instead of comparing with it.",
            {}),
        "html": ("--html FILE", "Write an HTML report to this path; it works offline.", {}),
        "manifest": ("--manifest FILE", "Write the model's shapes to this path, as a model for "
            "later commands.", {}),
        "output": ("-o --output FILE", "The file; gzipped if its name ends with .gz.", {}),
        "check": ("--check FILE", "Compare with this manifest instead of writing one.", {}),
        "fail_on_change": ("--fail-on {any,grown,never}", "What makes the exit code 1: any "
            "difference, or more bytes on a device or in its host's memory.", {"default": "any"}),
        "tolerance": ("--tolerance SHARE", "How much may be added with --fail-on grown, such as "
            "2%.", {"default": "0%"}),
        "most": ("--most NUMBER", "Maximum number of rows to show.", {"least": 1, "default": 20}),
    },
    "General": {
        "quiet": ("-q --quiet", "Write the result and errors alone: no notes, hints or progress.",
            {}),
        "color": ("--color {auto,always,never}", "Colours: by default on a terminal, unless "
            "NO_COLOR is set.", {"default": "auto"}),
    },
}  # fmt: skip
GROUP_OF: Final = {name: group for group, options in GROUPS.items() for name in options}
