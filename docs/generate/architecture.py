"""The drawing of ARCHITECTURE.md, docs/architecture.svg: packages in rows, and their imports.

The rows are those of tests/test_layers.py; the arrows are read from the import statements of src.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardyard"
LAYERS = ROOT / "tests" / "test_layers.py"

Rows = list[set[str]]
Imports = dict[str, set[str]]

WIDTH = 1010
ROW = 62
BOX = 34
GAP = 12
CONTROL_X = (16, 510)
FOLDER_X = (536, 656)
TRAINING_X = (682, 994)
"""Left and right edge of each column, in pixels; rows are ``ROW`` apart, boxes ``BOX`` high."""
TOP = 52

STYLE = """\
 text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:13px;fill:#1f2328}
 .h{font-weight:600;fill:#57606a}.s{fill:#57606a}
 .m{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12.5px}
 rect{fill:#ddf4ff;stroke:#54aeff}.base{fill:#f6f8fa;stroke:#8c959f}
 .folder{fill:#fff8c5;stroke:#bf8700}.half{fill:none;stroke:#8c959f;stroke-dasharray:5 4}
 .line{fill:none;stroke:#8c959f;stroke-width:1.3}.tip{fill:#8c959f}
 @media (prefers-color-scheme:dark){text{fill:#e6edf3}.h,.s{fill:#9da7b3}
 rect{fill:#0c2d4d;stroke:#388bfd}.base{fill:#161b22;stroke:#6e7681}
 .folder{fill:#3a2d05;stroke:#bb8009}.half{fill:none;stroke:#6e7681}}
"""
TITLE = (
    "The control half and the training half, each in rows of packages that import only from rows "
    "below. Both stand on the foundation; only the run folder is between them."
)


def drawing() -> str:
    """The whole SVG."""
    base, control, training = (
        without_io_parts(rows_named(name))
        for name in ("BASE_ROWS", "CONTROL_ROWS", "TRAINING_ROWS")
    )
    imports = imports_between(PACKAGE, set().union(*base, *control, *training))
    height = TOP + ROW * max(len(control), len(training))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 190}" '
        f'width="{WIDTH}" height="{height + 190}" role="img" aria-labelledby="title">',
        f'<title id="title">{TITLE}</title>',
        f"<style>\n{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
        *_half("Control half: no torch", CONTROL_X, control, imports, height),
        *_half("Training half: no cloud client", TRAINING_X, training, imports, height),
        *_folder(),
        *_base(base, height + 16),
        _text(16, height + 178, "s", "An arrow is an import. An import that follows from other "
              "arrows has none, and every package may import from the foundation."),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def rows_named(name: str, source: Path = LAYERS) -> Rows:
    """Rows of packages that a constant of test_layers.py lists, from the bottom up."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return [set(row) for row in ast.literal_eval(node.value)]
    raise ValueError(f"{source.name} has no constant {name}")


def without_io_parts(rows: Rows) -> Rows:
    """Rows without the single modules of ``io``, which the drawing shows as one package."""
    folded = [{name for name in row if not name.startswith("io.")} for row in rows]
    return [row for row in folded if row]


def imports_between(package: Path, rooms: set[str]) -> Imports:
    """Room -> other rooms that its modules import from, lazily too."""
    found: Imports = {room: set() for room in rooms}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        room = room_of(parts, rooms)
        if room in rooms:
            named = (room_of(tuple(name.split(".")[1:]), rooms) for name in _names(path))
            found[room] |= {name for name in named if name in rooms} - {room}
    return found


def room_of(parts: Sequence[str], rooms: set[str]) -> str:
    """The room that a module is in: its first two parts if they are a room, else its package."""
    longer = ".".join(parts[:2])
    return longer if longer in rooms else ".".join(parts[:1])


def _names(path: Path) -> Iterator[str]:
    """Dotted names of our own that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("shardyard."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("shardyard."))


def reduced(imports: Imports) -> Imports:
    """Imports without those that follow from others: of a to c through b, a to b and b to c."""

    @cache
    def below(room: str) -> frozenset[str]:
        direct = imports.get(room, set())
        return frozenset(direct).union(*(below(name) for name in direct))

    return {
        room: direct - set().union(*(below(name) for name in direct))
        for room, direct in imports.items()
    }


def _half(
    title: str, edges: tuple[int, int], rows: Rows, imports: Imports, height: int
) -> Iterator[str]:
    rooms = set().union(*rows)
    arrows = reduced({room: imports[room] & rooms for room in rooms})
    left, right = edges
    yield (
        f'<rect class="half" x="{left}" y="{TOP - 20}" width="{right - left}" '
        f'height="{height - TOP + 20}" rx="8"/>'
    )
    yield _text(left, TOP - 30, "h", title)
    layers, paths = _layered(rows, arrows)
    _order(layers, paths)
    places = _places(layers, edges, height)
    for path in paths:
        yield _arrow([places[name] for name in path])
    for name in sorted(places):
        if name in rooms:
            yield from _box(*places[name], name)


def _layered(rows: Rows, arrows: Imports) -> tuple[list[list[str]], list[list[str]]]:
    """Boxes of each row from the top down, and each arrow as the names it passes.

    An arrow that passes a row gets a lane there, with a name of its own: no line crosses a box.
    """
    layers = [sorted(row) for row in reversed(rows)]
    row_of = {room: number for number, row in enumerate(layers) for room in row}
    paths = []
    for room in sorted(arrows):
        for other in sorted(arrows[room]):
            passed = range(row_of[room] + 1, row_of[other])
            lanes = {number: f"{room}>{other}:{number}" for number in passed}
            for number, lane in lanes.items():
                layers[number].append(lane)
            paths.append([room, *lanes.values(), other])
    return layers, paths


def _order(layers: list[list[str]], paths: list[list[str]], sweeps: int = 8) -> None:
    """Put each name of a row near those that it is joined to in the rows next to it."""
    joined: dict[str, list[str]] = {name: [] for row in layers for name in row}
    for path in paths:
        for upper, lower in pairwise(path):
            joined[upper].append(lower)
            joined[lower].append(upper)
    for sweep in range(sweeps):
        near = {name: (index + 0.5) / len(row) for row in layers for index, name in enumerate(row)}
        for row in layers if sweep % 2 else layers[::-1]:
            wanted = {
                name: sum(near[other] for other in joined[name]) / len(joined[name])
                if joined[name]
                else near[name]
                for name in row
            }
            row.sort(key=lambda name: (wanted[name], name))
            near |= {name: (index + 0.5) / len(row) for index, name in enumerate(row)}


def _places(
    layers: list[list[str]], edges: tuple[int, int], height: int
) -> dict[str, tuple[int, int]]:
    """Middle and top of each box or lane; a row is in the middle of its half."""
    places: dict[str, tuple[int, int]] = {}
    for number, row in enumerate(reversed(layers)):
        y = height - number * ROW - BOX - 12
        x = (sum(edges) - sum(map(_width, row)) - GAP * (len(row) - 1)) // 2
        for name in row:
            places[name] = (x + _width(name) // 2, y)
            x += _width(name) + GAP
    return places


def _arrow(places: list[tuple[int, int]]) -> str:
    """A line from the bottom of one box through lanes to the top of another."""
    x, y = places[0][0], places[0][1] + BOX
    path = f"M{x} {y}"
    for number, (to_x, to_y) in enumerate(places[1:], start=2):
        is_last = number == len(places)
        to_y -= 3 if is_last else 0
        middle = (y + to_y) // 2
        path += f"C{x} {middle} {to_x} {middle} {to_x} {to_y}"
        path += "" if is_last else f"v{BOX}"
        x, y = to_x, to_y + BOX
    return f'<path class="line" marker-end="url(#tip)" d="{path}"/>'


def _folder() -> Iterator[str]:
    left, right = FOLDER_X
    middle, top = (left + right) // 2, TOP + 60
    bottom = top + 240
    yield (
        f'<rect class="folder" x="{left}" y="{top}" width="{right - left}" '
        f'height="{bottom - top}" rx="6"/>'
    )
    words = ["run folder", "", "recipe", "resolved.json", "plan.json", "", "events.jsonl"]
    words += ["metrics.jsonl", "checkpoints/", "profiles/"]
    for number, word in enumerate(words):
        if word:
            kind = "m" if number else "h"
            yield _text(middle, top + 30 + 20 * number, kind, word, anchor="middle")
    for row, (start, end) in (
        (90, (CONTROL_X[1], left)),
        (90, (right, TRAINING_X[0])),
        (170, (TRAINING_X[0], right)),
        (170, (left, CONTROL_X[1])),
    ):
        y = top + row
        yield f'<path class="line" marker-end="url(#tip)" d="M{start} {y}H{end}"/>'


def _base(rows: Rows, top: int) -> Iterator[str]:
    """The foundation: its packages as boxes by row, its single modules as one line of text."""
    modules = sorted(name for row in rows for name in row if (PACKAGE / f"{name}.py").is_file())
    boxes = [name for row in reversed(rows) for name in sorted(row - set(modules))]
    yield (f'<rect class="half" x="16" y="{top + 24}" width="{WIDTH - 32}" height="112" rx="8"/>')
    yield _text(16, top + 14, "h", "Foundation: both halves import it")
    width = sum(_width(name) for name in boxes) + 34 * (len(boxes) - 1)
    x = (WIDTH - width) // 2
    y = top + 38
    for name in boxes:
        yield from _box(x + _width(name) // 2, y, name, kind="base")
        x += _width(name) + 34
    half = (len(modules) + 1) // 2
    for number, part in enumerate((modules[:half], modules[half:])):
        yield _text(WIDTH // 2, y + 62 + 22 * number, "s", ", ".join(part), anchor="middle")


def _box(middle: int, y: int, name: str, *, kind: str = "room") -> Iterator[str]:
    width = _width(name)
    yield (
        f'<rect class="{kind}" x="{middle - width // 2}" y="{y}" width="{width}" '
        f'height="{BOX}" rx="6"/>'
    )
    yield _text(middle, y + 22, "m", name.replace(".", "/"), anchor="middle")


def _width(name: str) -> int:
    """Width of a box, or of a lane."""
    return 8 if ">" in name else 15 * len(name) // 2 + 20


def _text(x: int, y: int, kind: str, words: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'
