"""Writes plan.ipynb and runs it, so that its outputs are stored: python docs/notebooks/make.py."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent

CELLS = [
    """# A plan in a notebook

A plan decides the sharding of every array of a model on a mesh, without any device. This
model has four layers. Its arrays are abstract: they have only shapes and dtypes.""",
    """
import jax

import shardrules as sr


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


layer = {
    "wq": {"kernel": abstract(4096, 4096)},
    "wk": {"kernel": abstract(4096, 1000)},
    "wo": {"kernel": abstract(4096, 4096)},
    "up": {"kernel": abstract(4096, 16384)},
    "norm": {"scale": abstract(4096)},
}
params = {"embed": abstract(128_000, 4096), "layers": [layer] * 4}
rules = [
    (r"layers/\\d+/(wq|wk)/kernel", ("fsdp", "tp")),
    (r"layers/\\d+/wo/kernel", ("tp", "fsdp")),
    (".*", ()),
]
plan = sr.plan(params, rules, {"fsdp": 8, "tp": 16})
plan
""",
    """The table is the plan's `_repr_html_`. The largest rows come first; siblings are folded.
Below it a notebook has the plan's report, with a treemap, folded; it is left out here.

`check` lists mistakes. No rule is for the embedding and `up`, so the last rule silently
replicates them. And 16 does not divide a dimension of `wk`.""",
    "\nplan.check()\n",
    "`explain` gives the reasons for one array.",
    '\nplan.explain("layers/3/wk/kernel")\n',
    "Two more rules fix the first finding. Norms are replicated on purpose, so we declare them.",
    """
better = sr.plan(
    params,
    [("embed", ("tp", "fsdp")), ("up/kernel", ("fsdp", "tp")), *rules],
    {"fsdp": 8, "tp": 16},
)
better.check(replicated=["norm"])
""",
    "`diff` lists the changes. `bytes_per_device` counts the bytes for training with Adam:",
    """
print(better.bytes_per_device(gradients="bfloat16", optimizer=("float32", "float32")))
plan.diff(better)
""",
    """`sweep` compares all meshes of 128 devices with 100 MB each. It does not walk the tree
again.""",
    """
better.sweep(hbm=100 * 10**6, gradients="bfloat16", optimizer=("float32", "float32"))
""",
    """`plan.to_html("plan.html")` writes a report in one file, which works offline.
`plan.lock("plan.lock")` writes a text file to keep under version control.""",
]


def without_report(page: str) -> str:
    """Leave out a plan's report, whose scripts are not for a page of the docs."""
    return re.sub(r"<details><summary>Treemap.*</iframe></details>", "", page, flags=re.S)


def main() -> None:
    """Cell in turn: Markdown if it does not look like code."""
    notebook = new_notebook(
        metadata={
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        }
    )
    for number, text in enumerate(CELLS):
        make = new_code_cell if text.startswith("\n") else new_markdown_cell
        notebook.cells.append(make(text.strip(), id=f"cell-{number}"))
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata = {}
        for data in (output.get("data", {}) for output in cell.get("outputs", ())):
            if "text/html" in data:
                data["text/html"] = without_report(data["text/html"])
    notebook.metadata.language_info = {"name": "python"}  # versions would differ by machine
    nbformat.write(notebook, HERE / "plan.ipynb")


if __name__ == "__main__":
    main()
