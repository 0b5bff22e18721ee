"""Hostile names at each place where a name comes in, through each command and format."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress

import pytest

import shardrules as sr
from tests.support.command_line import invoke
from tests.support.files import header_file
from tests.support.hostile_names import HOSTILE, assert_safe
from tests.support.slow import slow

# All that at once, for each run; one by one in `make test-all`.
WORST = (
    "a\x1b[2J\x9b31m\u202e\x85\u2028\r\n0 errors, 0 warnings, 0 info\n::error::x ##[error]y [/x]",
    "::error::forged", "  ::error::[/x]", "##[error]forged",
)  # fmt: skip

# The files and options of a small model, with a name from anybody in one place of them.
MODEL = [["layers/w", [4096, 1024], "F32"], ["embed", [4096, 4096], "F32"]]
RULES = {"rules": [["layers", ["fsdp", "tp"]], [".*", []]]}


def write(path, content):
    with suppress(OSError, ValueError):  # no file can have this name, which is told
        path.write_text(json.dumps(content))
    return str(path)


def safetensors(path, names):
    header, at = {}, 0
    for name in names:
        header[name] = {"dtype": "F32", "shape": [8, 8], "data_offsets": [at, at := at + 256]}
    path.write_bytes(header_file(header, bytes(at)))
    return str(path)


A_CLASS = "class A: shape, dtype = (8, {}), {}\ndef tree(): return {}"


def named(*name):
    """The model with an array of this name more."""
    return {"params": [*MODEL, *([one, [4096, 1024], "F32"] for one in name)]}


def first(*rules):
    """The rules with these before them."""
    return [*rules, *RULES["rules"]]


# Where a name comes in: what is not as in HARMLESS, by that name.
PLACES = {
    "array": lambda x: {"model": named(x)},
    "arrays alike": lambda x: {"model": named(*(f"{i}/{x}" for i in range(3)))},
    "safetensors": lambda x: {"safetensors": ["w", x]},
    "model of a manifest": lambda x: {"model": {"model": x, "params": MODEL}},
    "dtype": lambda x: {"model": {"params": [["w", [8, 8], x]]}},
    "key of a manifest": lambda x: {"model": {"params": [["w", {x: x}, "F32"]]}},
    "file of a model": lambda x: {"model file": f"{x}.json"},
    "no file of a model": lambda x: {"no model": f"nowhere/{x}"},
    "no JSON": lambda x: {"model": 3, "model file": f"{x}.json"},
    "file of rules": lambda x: {"rules file": f"{x}.json"},
    "pattern": lambda x: {"rules": first([re.escape(x), ["tp"]])},
    "pattern that needs re": lambda x: {"rules": first([f"(?=x){re.escape(x)}", ["tp"]])},
    "pattern that is none": lambda x: {"rules": first([f"(?P<{x}", []])},
    "extension of re": lambda x: {"rules": first([f"{x}(?{x}", []])},
    "declared pattern": lambda x: {
        "rules": {**RULES, "replicated": [f"(?=x){re.escape(x)}", f"({x}"]}},
    "axis of a rule": lambda x: {"rules": [["layers", [x, "tp"]], [".*", []]]},
    "axis of a rule beside another": lambda x: {
        "rules": [["layers", [["fsdp", x], "tp"]], [".*", []]]},
    "axis of rule and mesh": lambda x: {
        "rules": [["layers", [x, "tp"]], [".*", []]], "mesh": f"{x}=8,tp=4"},
    "axis of the mesh": lambda x: {"mesh": f"fsdp=8,tp=4,{x}=2"},
    "size of the mesh": lambda x: {"mesh": f"fsdp={x}"},
    "dialect": lambda x: {"rules": {**RULES, "dialect": x}},
    "key of rules": lambda x: {"rules": {**RULES, x: x}},
    "correction": lambda x: {"rules": {**RULES, "correction": {"rank": x}}},
    "tree of a module": lambda x: {
        "module": A_CLASS.format(8, "'float32'", f"{{{x!r}: A(), 'b': [A(), A()]}}")},
    "dtype of a module": lambda x: {"module": A_CLASS.format(8, repr(x), "[A()]")},
    "shape of a module": lambda x: {"module": A_CLASS.format(repr(x), "'int8'", f"{{{x!r}: A()}}")},
    "error of a module": lambda x: {"module": f"def tree(): raise RuntimeError({x!r})"},
}  # fmt: skip
HARMLESS = {
    "model": {"params": MODEL}, "model file": "model.json", "rules": RULES, "rules file": "rules.json",
    "mesh": "fsdp=8,tp=4",
}  # fmt: skip


def files_given(directory, **changes):
    """The model, the rules and the mesh that a command is given, harmless but for the changes."""
    given = HARMLESS | changes
    model = write(directory / given["model file"], given["model"])
    rules = write(directory / given["rules file"], given["rules"])
    if "safetensors" in given:
        model = safetensors(directory / "m.safetensors", given["safetensors"])
    if "no model" in given:
        model = f"{directory}/{given['no model']}"
    if "module" in given:
        sys.modules.pop("hostile_module", None)
        file = directory / "hostile_module.py"
        file.write_text(given["module"], encoding="utf-8", errors="surrogatepass")
        model = "hostile_module:tree"
    return model, rules, given["mesh"]


OPTIONS = (
    "--level", "--large", "--fail-on", "--replicated", "--optional-axes", "--data-axes", "--dialect",
    "--head-dim", "{}",
)  # fmt: skip


COMMANDS = """
plan MODEL --hbm 1GB --lock plan.lock
plan MODEL --format json
check MODEL --large 1kB OPTION
check MODEL --large 1kB --format json OPTION
check MODEL --large 1kB --format github OPTION
explain MODEL layers/w
explain MODEL embed/x
sweep MODEL -m fsdp=2
check MODEL --fix
suggest MODEL_ALONE
suggest MODEL_ALONE --format python
diff plan.lock MODEL
diff plan.lock harmless.lock
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sr.plan({}, [], {"tp": 2}).lock("harmless.lock")
    return tmp_path


def told(here, name, changes, *option):
    """Per command what it tells with this name somewhere, which must be safe."""
    found = {}
    model, rules, mesh = files_given(here, **changes)
    words_of = {
        "MODEL": (model, "--rules", rules, "--mesh", mesh), "MODEL_ALONE": (model, "--mesh", mesh), "OPTION": option,
    }  # fmt: skip
    for line in COMMANDS.strip().splitlines():
        words = [word for each in line.split() for word in words_of.get(each, [each])]
        for is_terminal in (False, True):
            code, out, err = (done := invoke(*words, is_terminal=is_terminal)).exit_code, done.stdout, done.stderr
            assert_safe(out, is_github="github" in line)
            assert_safe(re.sub(r" \.\.\.\r|\x1b\[K", "\n", err) if is_terminal else err)
            err = err.rpartition("\x1b[K")[2]  # behind the line of what it works at
            assert code in (0, 1, 2)
            assert (code == 2) == any(each.startswith("error: ") for each in err.split("\n")), err
            assert "bug in shardrules" not in err
            # What the user's own code raises is told with its lines, if several with the fix behind.
            count = len(name.splitlines()) if " has raised RuntimeError: " in err else 1
            errors = err.count("\n") - (count if count > 1 else 0)
            lines = None if is_terminal or line.startswith("suggest") or "fix" in line else (out.count("\n"), errors)
            summary = out.split("\n")[-2:] if line.endswith("1kB OPTION") and code != 2 else None
            found[line, is_terminal] = (code, lines, summary)
    return found


NAMES = pytest.mark.parametrize("names", [WORST, slow(HOSTILE)], ids=["worst", "all"])


@NAMES
@pytest.mark.parametrize("place", PLACES)
def test_no_name_is_raw_or_a_line_or_a_command(here, place, names):
    a_name = "a harmless name"
    harmless = told(here, a_name, PLACES[place](a_name))
    for name in names:
        found = told(here, name, PLACES[place](name))
        # What went as well as with a harmless name has as many lines, and the same summary.
        for key, (code, *rest) in found.items():
            if code == harmless[key][0]:
                assert rest == list(harmless[key][1:]), key


@NAMES
@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_s_value_is_raw_or_a_line_or_a_command(here, option, names):
    for name in names:
        told(here, name, {}, option.replace("{}", name), name)
