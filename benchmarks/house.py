"""`python -m benchmarks.house`: the source in figures, and what a call enters of it."""

from __future__ import annotations

import ast
import collections
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import shardrules as sr

ROOT = Path(sr.__file__).parent
VAGUE = set(
    """one found made given other more held shown wanted chosen left told whole met beside known
    listed said alike own every of like""".split()  # noqa: SIM905
)
NOUN_STARTS = set(
    """The A An Whether What Which Per Of How All Each Those That Where When If As It One
    Every""".split()  # noqa: SIM905
)


def main() -> None:
    """Print both tables."""
    for name, value in figures():
        print(f"{name:55} {value:>10}")
    print(f"\n{'call':40} {'calls':>7} {'functions':>10} {'files':>6}")
    for name, calls, functions, files in entered():
        print(f"{name:40} {calls:7} {functions:10} {files:6}")


def figures() -> Iterator[tuple[str, Any]]:
    """Yield what the files of the package count, by name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    lines = sum(text.count("\n") for text in texts)
    yield "files", len(texts)
    yield "lines", lines
    yield "lines of code, without docstrings, comments and blanks", sum(map(_code_lines, texts))
    heads = sum(map(_lines_before_definitions, texts, trees))
    yield "lines before the first definition, %", f"{100 * heads / lines:.1f}"
    names = [name for tree in trees for name in _bound_names(tree)]
    vague = sum(name in VAGUE for name in names)
    yield "vague names, % of bindings", f"{100 * vague / len(names):.2f}"
    tops = collections.Counter(name for tree in trees for name in _top_names(tree))
    yield "top-level names in two modules", sum(count > 1 for count in tops.values())
    docs = [doc for tree in trees for doc in _docstrings(tree)]
    nouns = sum(doc.split()[0].rstrip(",.:;'s") in NOUN_STARTS for doc in docs)
    yield "docstrings that begin with a noun or clause, %", f"{100 * nouns / len(docs):.0f}"
    yield "public names of shardrules", len(sr.__all__)


def _code_lines(text: str) -> int:
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    previous = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_doc = token.type == tokenize.STRING and previous in (
            tokenize.INDENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENCODING, tokenize.DEDENT
        )  # fmt: skip
        if token.type not in (*ignored, tokenize.ENDMARKER) and not is_doc:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type != tokenize.COMMENT:
            previous = token.type
    return len(lines)


def _lines_before_definitions(text: str, tree: ast.Module) -> int:
    kinds = (ast.FunctionDef, ast.ClassDef)
    first = next((node.lineno for node in tree.body if isinstance(node, kinds)), None)
    return min(text.count("\n") if first is None else first, text.count("\n")) - 1


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _top_names(tree: ast.Module) -> set[str]:
    return {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def _docstrings(tree: ast.Module) -> Iterator[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return (doc for function in functions if (doc := ast.get_docstring(function)))


def entered() -> Iterator[tuple[str, int, int, int]]:
    """Yield (call, calls of ours, distinct functions, files) of warm calls of eight leaves."""
    tree = {f"l{i}": {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")} for i in range(8)}
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    rules = [("kernel", P("fsdp", "tp")), (".*", P())]
    sizes = {"fsdp": 4, "tp": 2}
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
    yield "match_partition_rules", *_counted(lambda: sr.match_partition_rules(rules, tree))
    yield "named_shardings", *_counted(lambda: sr.named_shardings(tree, rules, sizes))
    yield "shard", *_counted(lambda: sr.shard(arrays, rules, mesh))
    yield "plan", *_counted(lambda: sr.plan(tree, rules, sizes))
    yield "plan + check", *_counted(lambda: sr.plan(tree, rules, sizes).check())
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder, "model.json"), Path(folder, "rules.toml")
        model.write_text(
            '{"params": [["a/kernel", [64, 64], "BF16"], ["b/kernel", [64, 64], "BF16"], '
            '["c/bias", [64], "BF16"]]}'
        )
        text.write_text('[[rules]]\npattern = "kernel"\nspec = ["fsdp", "tp"]\n')
        sys.argv = ["shardrules", "check", str(model), "-r", str(text), "-m", "fsdp=4,tp=2"]
        yield "shardrules check, three arrays, a whole process", *_counted_in_a_process()
        file = Path(folder, "model.safetensors")
        save_file({f"l{i}/kernel": np.zeros((64, 64), "float32") for i in range(25)}, file)
        yield "load, 25 arrays", *_counted(lambda: sr.load(file, rules, mesh))


def _counted(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Count calls into the package, distinct functions and files, of the third call.

    Lambdas, comprehensions and generators do not count.
    """
    call()
    call()
    return _profiled(call)


def _counted_in_a_process() -> tuple[int, int, int]:
    """Count the same of the command in `sys.argv`, with the imports that it makes."""
    code = f"import sys; sys.argv = {sys.argv!r}; from benchmarks.house import main_of_command"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; main_of_command()"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    calls, functions, files = map(int, done.stdout.split()[-3:])
    return calls, functions, files


def main_of_command() -> None:
    """Print what the command in `sys.argv` enters."""

    def command() -> None:
        from shardrules._cli import main  # noqa: PLC0415 - its import counts

        with contextlib.suppress(SystemExit):
            main()

    print(*_profiled(command))


def _profiled(call: Callable[[], Any]) -> tuple[int, int, int]:
    entries: collections.Counter[Any] = collections.Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and code.co_name[0] != "<":
            entries[code] += not code.co_flags & 0x20

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    entries = +entries
    return entries.total(), len(entries), len({code.co_filename for code in entries})


if __name__ == "__main__":
    main()
