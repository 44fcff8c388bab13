"""The import picture: two halves that never import each other, and no cycle.

docs: design of the package. Read from the source by ast, lazy imports inside functions included.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardyard.launchers.base import NODE_ASSIGNMENT_READERS

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "shardyard"

BASE_ROWS = [
    {"units", "io", "io.sanitize", "log", "io.polling", "own_processes"},
    {"errors"},
    {
        "io.yaml",
        "io.files",
        "git",
        "io.aws",
        "plugins",
        "file_faults",
        "control_groups",
        "network_interface",
        "foreign_variables",
    },
    {"hardware", "io.digests", "families", "set_up", "own_code"},
    {"io.object_store"},
    {"config"},
    {"rundir"},
    {"telemetry.health"},
]
CONTROL_ROWS = [
    {"planner", "doctor", "launchers.monitoring", "importers"},
    {"image"},
    {"launchers", "report", "bench"},
    {"transfer", "cluster", "report.study", "trackers"},
    {"control", "io.terminal", "io.path_option"},
    {"drill", "report.serve", "report.terminal"},
    {"cli", "node"},
]
TRAINING_ROWS = [
    {"torch_private"},
    {"data", "models"},
    {"parallel"},
    {"tasks"},
    {"checkpoint", "observe", "telemetry"},
    {"train", "evaluation"},
    {"elastic", "library"},
]
"""From the bottom up: a package imports from rows below its own, never from its own row. A
room with a dot has its own row, next to the package that it is in."""

BASE = set().union(*BASE_ROWS)
CONTROL = set().union(*CONTROL_ROWS)
TRAINING = set().union(*TRAINING_ROWS)


def allowed() -> dict[str, set[str]]:
    """Package -> packages it may import, beside itself and shardyard's version."""
    found: dict[str, set[str]] = {}
    for rows in (BASE_ROWS, BASE_ROWS + CONTROL_ROWS, BASE_ROWS + TRAINING_ROWS):
        for number, row in enumerate(rows):
            found |= dict.fromkeys(row, set().union(*rows[:number]))
    return found


MAY_IMPORT = allowed()

TRAINING_ENGINES = {"torch", "torchao", "transformers"}
CLOUD_CLIENTS = {"kubernetes", "boto3", "botocore"}

MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = {path: ".".join(path.relative_to(SRC).with_suffix("").parts) for path in MODULES}


def shown(path: Path) -> str:
    return str(path.relative_to(SRC))


def room_of(parts: tuple[str, ...]) -> str:
    """Row entry that a module belongs to: ``("io", "files")`` -> io.files, or its package."""
    room = ".".join(parts[:2])
    return room if room in MAY_IMPORT else parts[0]


def package_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "cli" if parts == ("__main__",) else room_of(parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(nodes: Iterator[ast.AST] | list[ast.AST]) -> Iterator[str]:
    """Dotted names of all imports; of `from a import b`, both a and a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name lives"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not in functions, not for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_types:
            continue
        yield child
        yield from at_import_time(child)


def is_folder(name: str) -> bool:
    """Is a dotted name a package, and no module."""
    return (SRC / name.replace(".", "/") / "__init__.py").is_file()


@cache
def inner_packages(path: Path) -> set[str]:
    """Rooms that a module imports from; of ``from shardyard.io import files``, io.files only."""
    nodes = ast.walk(tree_of(path))
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and is_folder(str(node.module)):
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {name for name in modules if (SRC / f"{name.replace('.', '/')}.py").is_file()}
            names |= files | {name for name in modules - files if is_folder(name)}
            names |= set() if len(names & modules) == len(modules) else {str(node.module)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= set(imports([node]))
    parts = [tuple(name.split(".")) for name in names]
    return {room_of(name[1:]) for name in parts if name[0] == "shardyard" and len(name) > 1}


@cache
def outer_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(ast.walk(tree_of(path)))}


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    package = package_of(path)
    if package == "__init__":  # names for the type checker; they are looked up at first use
        assert inner_packages(path) == {"control", "library"}
        assert {name.split(".")[0] for name in imports(at_import_time(tree_of(path)))} == {
            "importlib", "typing",
        }  # fmt: skip
        return
    foreign = inner_packages(path) - MAY_IMPORT[package] - {package, "__version__"}
    assert foreign == set(), f"{package} may not import {foreign}"


def test_the_control_half_never_imports_torch() -> None:
    guilty = {
        shown(path): found
        for path in MODULES
        if package_of(path) in BASE | CONTROL and (found := outer_packages(path) & TRAINING_ENGINES)
    }
    assert guilty == {}


def test_the_training_half_never_imports_a_cloud_client() -> None:
    guilty = [
        shown(path)
        for path in MODULES
        if package_of(path) in TRAINING and outer_packages(path) & CLOUD_CLIENTS
    ]
    assert guilty == []


def test_operations_know_no_terminal() -> None:
    """What they say goes through logging, what they ask through callables."""
    guilty = [
        shown(path)
        for path in MODULES
        if package_of(path) == "control" and outer_packages(path) & {"click", "rich"}
    ]
    assert guilty == []


@pytest.mark.parametrize("place", sorted(NODE_ASSIGNMENT_READERS.values()))
def test_a_node_knows_its_place_without_a_client_of_its_scheduler(place: str) -> None:
    start = place.partition(":")[0].removeprefix("shardyard.").replace(".", "/") + ".py"
    assert not [shown(path) for path in reached(start) if outer_packages(path) & CLOUD_CLIENTS]


def test_no_two_packages_import_each_other() -> None:
    arrows = {(package_of(path), other) for path in MODULES for other in inner_packages(path)} - {
        (package, package) for package in MAY_IMPORT
    }
    pairs = {(a, b) for a, b in arrows if a < b and (b, a) in arrows}
    assert pairs == set(), "move what one of them needs further down"


def imported_modules(path: Path) -> set[str]:
    """Our modules that one imports, inside functions and for types included.

    Of ``from a import b``, the module ``a.b`` where there is one, and ``a`` otherwise.
    """
    known = {name.removesuffix(".__init__") for name in NAMES.values()}
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & known) | ({str(node.module)} if full - known else set())
    return found & known - {NAMES[path].removesuffix(".__init__"), "shardyard"}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Largest sets of modules in which each reaches each other."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for name in graph:
        left = list(graph[name])
        while left:
            new = graph[left.pop()] - reach[name]
            reach[name] |= new
            left += new
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return groups - {frozenset()}


def test_there_is_no_import_cycle() -> None:
    graph = {NAMES[path].removesuffix(".__init__"): imported_modules(path) for path in MODULES}
    found = {
        frozenset(name.removeprefix("shardyard.") for name in circle) for circle in circles(graph)
    }
    assert found == set(), "move what both need further down"


def test_there_is_no_import_cycle_at_import_time() -> None:
    known = {name.removesuffix(".__init__") for name in NAMES.values()}
    graph = {
        name.removesuffix(".__init__"): set(imports(at_import_time(tree_of(path))))
        & known - {name.removesuffix(".__init__"), "shardyard"}
        for path, name in NAMES.items()
    }
    assert circles(graph) == set()


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == {frozenset("bc")}


# One module asks the device itself. Kinds are words elsewhere only where the control half tells
# machines apart: in the recipe's check, the catalogue of hardware and the launchers.
DEVICE_SEAM = "parallel/device.py"
KINDS = {"cuda", "xpu", "hpu", "xla", "rocm", "hip", "habana", "nccl", "rccl", "hccl", "xccl"}


def words(text: str) -> set[str]:
    """``torch.is_cuda`` -> torch, is, cuda."""
    return set(re.findall("[a-z]+", text.lower()))


def named(path: Path) -> Iterator[tuple[int, str]]:
    """Every name and text of a module's code with its line; no docstrings, no comments."""
    nodes = list(ast.walk(tree_of(path)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in imports([node]))


def test_only_the_device_module_of_the_training_half_names_kinds_of_accelerators() -> None:
    guilty = [
        f"{shown(path)}:{line}: {text}"
        for path in MODULES
        if package_of(path) in TRAINING and path != PACKAGE / DEVICE_SEAM
        for line, text in named(path)
        if words(text) & KINDS or "torch.accelerator" in text
    ]
    assert guilty == []
    assert any(words(text) & KINDS for _, text in named(PACKAGE / DEVICE_SEAM))


FOUNDATION = {"errors", "io", "io.digests", "io.files", "io.polling", "io.sanitize", "log"} | {
    "control_groups", "plugins", "torch_private", "units",
}  # fmt: skip
TRAINS = {"checkpoint", "config", "data", "families", "models", "parallel", "rundir"} | {
    "tasks", "train",
}  # fmt: skip
OWN_CODE = {"own_code", "own_processes"}
"""The user's functions in a loss: where one fails, the message names its line."""
REACHED = {
    "train/loop.py": FOUNDATION | TRAINS | OWN_CODE | {"observe"},
    "library/__init__.py": FOUNDATION | TRAINS | OWN_CODE | {"library", "file_faults", "git"},
}
"""Packages that a module imports, lazily too, and what these import. Add one only with a reason:
whoever changes the module has to know them. Better, hand the module what it needs."""

FOR_RECIPES_ALONE = {
    f"shardyard.config.{name}" for name in ("load", "auto", "resolve", "cluster_choice")
} | {
    "shardyard.config.rules.check",
    "shardyard.config.model.hub",
    "shardyard.config.model.source",
    "shardyard.config.schema.json_schema",
    "shardyard.hardware",
    "shardyard.io.yaml",
    "shardyard.library",
}
"""How a recipe is read, checked and resolved; processes that train read what came of it. And what
scripts call."""


def reached(start: str, package: Path = PACKAGE) -> set[Path]:
    """Our modules that one imports, lazily too, and what these import; itself included.

    The package's own ``__init__`` only names what is looked up at first use.
    """
    paths = {
        path.relative_to(package.parent).with_suffix(""): path for path in package.rglob("*.py")
    }
    places = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    found, left = {package / start}, [package / start]
    while left:
        names = set(imports(ast.walk(tree_of(left.pop())))) - {"shardyard"}
        new = {places[name] for name in names & places.keys()} - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("start", REACHED)
def test_a_module_reaches_only_the_packages_it_is_allowed(start: str) -> None:
    assert {package_of(path) for path in reached(start)} == REACHED[start]


NOT_FOR_SCRIPTS = {
    f"shardyard.config.{name}" for name in ("load", "auto", "resolve", "cluster_choice", "resolved")
} | {
    "shardyard.config.rules.check",
    "shardyard.config.model.hub",
    "shardyard.config.schema.json_schema",
    "shardyard.hardware",
    "shardyard.io.yaml",
}
"""How files are read, machines found and a recipe resolved: a script says what it wants."""


def test_a_script_reads_no_files_and_knows_no_machines() -> None:
    names = {NAMES[path].removesuffix(".__init__") for path in reached("library/__init__.py")}
    parts = {".".join(name.split(".")[:length]) for name in names for length in (2, 3, 4)}
    assert parts & NOT_FOR_SCRIPTS == set()
    assert "shardyard.config.validate" in parts, "by the rules of a recipe all the same"


@pytest.mark.parametrize("start", ["train/run.py", "elastic/worker.py"])
def test_a_process_that_trains_reads_what_was_resolved_and_not_how(start: str) -> None:
    names = {NAMES[path].removesuffix(".__init__") for path in reached(start)}
    parts = {".".join(name.split(".")[:length]) for name in names for length in (2, 3, 4)}
    assert parts & FOR_RECIPES_ALONE == set()


SLOW_TO_START = {
    "data/work_units.py": {"torch", "pydantic", "huggingface_hub"},
    "data/text_datasets.py": {"torch", "huggingface_hub"},
}
"""Libraries that take longer to import than a small corpus takes to prepare. Each worker imports
work_units.py."""


def imported_with(start: str) -> set[Path]:
    """Our modules that are imported with one at once; itself included."""
    places = {NAMES[path].removesuffix(".__init__"): path for path in MODULES}
    found, left = {PACKAGE / start}, [PACKAGE / start]
    while left:
        names = set(imports(at_import_time(tree_of(left.pop()))))
        new = {places[name] for name in names & places.keys()} - found
        found |= new
        left += new
    return found


@pytest.mark.parametrize("start", SLOW_TO_START)
def test_preparing_waits_for_no_library_that_it_does_not_use(start: str) -> None:
    guilty = {
        shown(path): slow
        for path in imported_with(start)
        if (
            slow := {name.split(".")[0] for name in imports(at_import_time(tree_of(path)))}
            & SLOW_TO_START[start]
        )
    }
    assert guilty == {}
    assert PACKAGE / "data/tokenizer.py" in imported_with(start), "imports are followed"


FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "manager", "core"}


def test_no_file_has_a_name_that_says_nothing() -> None:
    parts = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert parts & FORBIDDEN_NAMES == set()


def test_every_module_says_its_story_first() -> None:
    without = [
        shown(path)
        for path in MODULES
        if not ast.get_docstring(tree_of(path)) and path.read_text().strip()
    ]
    assert without == []
