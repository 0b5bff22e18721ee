"""Writes plan.ipynb and runs it, so that its outputs are stored: python docs/notebooks/make.py."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent

CELLS = [
    """# A plan in a notebook

A plan decides what every array of a model gets on a mesh, before any device is touched. This
model has four layers; its arrays are shapes alone.""",
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
    """The table above is the plan's `_repr_html_`: the rows with most bytes first, siblings folded.

`check` lists what is wrong. The rules forget the embedding and `up`, which the last rule
replicates silently, and `wk` does not divide by 16.""",
    "print(plan.check())",
    "Why does a single array get what it gets?",
    'print(plan.explain("layers/3/wk/kernel"))',
    "Two rules mend the first finding. Norms are meant to be replicated, so they are declared.",
    """
better = sr.plan(
    params,
    [("embed", ("tp", "fsdp")), ("up/kernel", ("fsdp", "tp")), *rules],
    {"fsdp": 8, "tp": 16},
)
print(better.check(replicated=["norm"]))
""",
    "What has changed, and what each device holds when training with Adam:",
    """
print(plan.diff(better))
print()
print(better.bytes_per_device(gradients="bfloat16", optimizer=("float32", "float32")))
""",
    """The same leaves and rules on all meshes of 128 devices, of 100 MB each. The tree is not
walked again.""",
    """
print(better.sweep(hbm=100 * 10**6, gradients="bfloat16", optimizer=("float32", "float32")))
""",
    """`plan.to_html("plan.html")` writes the whole report as one file that works offline, and
`plan.lock("plan.lock")` a text to keep under version control.""",
]


def main() -> None:
    """Cells in turn: Markdown if it does not look like code."""
    notebook = new_notebook(
        metadata={
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        }
    )
    code = ("\n", "print(")
    for number, text in enumerate(CELLS):
        make = new_code_cell if text.startswith(code) else new_markdown_cell
        notebook.cells.append(make(text.strip(), id=f"cell-{number}"))
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata.language_info = {"name": "python"}  # versions would differ by machine
    nbformat.write(notebook, HERE / "plan.ipynb")


if __name__ == "__main__":
    main()
