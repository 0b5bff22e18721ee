"""Who imports whom: no module in a circle, and each room only from those to its left.

Every import counts, also those in functions and those for type checkers alone, with one exception:
functions that are the bodies of `Plan`'s methods say in their signatures that they take a `Plan`.
"""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shardrules

ROOT = Path(shardrules.__file__).parent
# From left to right; in docs/architecture.md from top to bottom. The first three floors are the layer.
ROOMS = (
    "_core", "_base", "_rules", "_place", "_program.topologies", "_plan", "_plan.files", "_plan.suggest", "_checkpoint", "_program", "_program.step", "_program.verify",
    "_program.solve", "compat", "dialects", "types", "__init__", "_cli", "__main__",
)  # fmt: skip


def modules():
    """{name without the package's: its file}; the stubs stand for the core and the public names."""
    files = [*ROOT.rglob("*.py"), *ROOT.glob("*.pyi")]
    files.remove(ROOT / "__init__.py")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


MODULES = modules()


def is_signature_of_plan(name, statement):
    """Whether it is the import of `Plan` that its own room has for type checkers alone."""
    return name.startswith("_plan.") and ast.unparse(statement) == ("from shardrules._plan.plan import Plan")


def imported(name):
    """The modules of the package that a module imports anywhere in its text."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            block.body = [each for each in block.body if not is_signature_of_plan(name, each)]
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            named = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, name
            named = [f"{statement.module}.{alias.name}" for alias in statement.names]
        else:
            continue
        for full in named:
            package, *parts = full.split(".")
            if package == "shardrules" and parts:
                yield module_of(parts)


def module_of(parts):
    """The module that this dotted name is, or is a name in."""
    for end in range(len(parts), 0, -1):
        for module in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if module in MODULES:
                return module
    return "__init__"


IMPORTS = {name: set(imported(name)) - {name} for name in MODULES}


def room_of(module):
    """The longest beginning of its name that is a room."""
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(name for name in names if name in ROOMS)


def test_no_module_is_in_a_circle_of_imports():
    try:
        tuple(TopologicalSorter(IMPORTS).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_room_imports_only_from_rooms_to_its_left():
    wrong = [
        f"{module} imports {other}"
        for module in sorted(MODULES)
        for other in IMPORTS[module]
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert not wrong


def test_no_import_is_a_string_but_in_the_tables_of_public_names():
    """`import_module("...")` hides who needs whom; it is for other libraries alone."""
    hidden = [
        f"{name}: {ast.unparse(call)}"
        for name, file in MODULES.items()
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("import_module", "__import__"))
        if any(
            isinstance(part, ast.Constant) and str(part.value).partition(".")[0] == "shardrules"
            for part in ast.walk(call)
        )
    ]
    assert hidden == []


def test_the_graph_is_that_of_the_package():
    assert "_rules.rules" in IMPORTS["__init__"]
    assert "_core" in IMPORTS["_rules.matcher"]
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_no_two_classes_have_one_name():
    names = [
        statement.name
        for file in MODULES.values()
        for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_")
    ]
    assert {name for name, count in Counter(names).items() if count > 1} == set()


def test_no_assert_has_a_comparison_as_its_message():
    """`assert a, b == c` can hardly fail: the comparison is what it would say."""
    files = [*Path(__file__).parent.rglob("*.py")]
    wrong = [
        f"{file.name}:{statement.lineno}"
        for file in files
        for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(statement, ast.Assert) and isinstance(statement.msg, ast.Compare)
    ]
    assert files
    assert wrong == []
