"""Files and functions stay as small as a reader can hold, and files no smaller than an idea."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "shardyard"
FILE_LINES, FUNCTION_LINES = 650, 60
ABOVE = {
    "parallel/apply.py:parallelize": 62,
    "train/setup.py:set_up_phase": 62,
}
"""Lines of what is longer; none of these may grow, and nothing may join them."""

SMALL_LINES = 40
SMALL = {
    "checkpoint/io_priority.py": "the agent imports it, without torch",
    "checkpoint/staging_protocol.py": "protocols",
    "cli/report.py": "a verb is the file of its name, loaded when it is called",
    "cli/serve.py": "a verb is the file of its name, loaded when it is called",
    "cli/train.py": "a verb is the file of its name, loaded when it is called",
    "checkpoint/upload_protocol.py": "protocols",
    "config/rules/bucket.py": "rules of one setting, next to its neighbours",
    "config/rules/plan_only.py": "scripts may not reach the choice of a cluster",
    "config/schema/base.py": "base of all sections",
    "config/schema/json_schema.py": "validation reaches it without the reference of settings",
    "data/byte_ranges.py": "base types of stores, which plug-ins import",
    "data/images/digits.py": "holds the licence of its data",
    "data/shown.py": "decodes tokens, which the reading of samples does not know",
    "rundir/confusion.py": "the report reads it, without torch",
    "tasks/confusion.py": "counts of labels and of images alike",
    "doctor/finding.py": "what all checks return, without any of them",
    "elastic/torchrun.py": "a program: python -m shardyard.elastic.torchrun",
    "elastic/preload_compiler.py": "the fork server imports it by name before it starts workers",
    "families/images/registry.py": "registry",
    "io/sanitize.py": "errors.py imports it, which every package imports",
    "launchers/aws_batch/node_rank.py": "a node imports it by name, without the AWS client",
    "launchers/registry.py": "registry",
    "importers/configs/shardyard_manifest.py": "a file for each kind of source, as its neighbours",
    "log.py": "packages of both halves log by it, without click",
    "node/ask_profile.py": "a program: python -m shardyard.node.ask_profile",
    "node/env_entry.py": "a program: python -m shardyard.node.env_entry",
    "parallel/model.py": "protocol of a model; the training loop may not reach more",
    "parallel/step_counters.py": "protocol",
    "report/compare/line_styles.py": "pages draw the legend by it, without matplotlib",
    "config/mixture.py": "training and preparation share it, and neither may reach the other",
    "config/dataset_name.py": "both halves name datasets by it, and control may not import data/",
    "config/tokenizer_kinds.py": "registry",
    "families/presets.py": "registry",
    "io/path_option.py": "imports click, which the rest of io/ but the terminal may not",
    "models/grad_scale.py": "models, parallel and tasks share it; train moves the factor",
    "models/submodules.py": "what builds, splits and runs a model finds its parts by it",
    "node/log_markers.py": "three programs of a node print by it",
    "tasks/loss_computation.py": "protocol",
    "train/generated_texts.py": "text and no scores; both the loop and the end of a run need it",
}
"""Files with fewer lines of code, each with why it is a file of its own; none may join that is
not a registry, a protocol, a program, or imported where its neighbours may not be."""


def _sizes() -> Iterator[tuple[str, int, int]]:
    """Name, lines and aim of every file, and of every function without its docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        yield name, text.count("\n"), FILE_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_words = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[1 if has_words else 0]
                lines = (node.end_lineno or first.lineno) - first.lineno + 1
                yield f"{name}:{node.name}", lines, FUNCTION_LINES


@pytest.mark.heavy
def test_no_file_and_no_function_grows_beyond_what_a_reader_holds() -> None:
    too_long = {name: lines for name, lines, aim in _sizes() if lines > ABOVE.get(name, aim)}
    assert too_long == {}


def _code_lines(text: str) -> int:
    """Lines without blank ones, comments and docstrings, those of attributes too."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                words.update(range(first, (last or first) + 1))
    return sum(
        number not in words and line.strip() != "" and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


@pytest.mark.heavy
def test_no_file_is_smaller_than_an_idea() -> None:
    lines = {
        str(path.relative_to(PACKAGE)): _code_lines(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    found = {name for name, count in lines.items() if count < SMALL_LINES}
    problems = [
        f"{name} has {lines[name]} lines of code, under {SMALL_LINES}: merge it into a file of the "
        'same idea, or add a line "FILE": "reason" to SMALL'
        for name in sorted(found - SMALL.keys())
    ]
    problems += [
        f'delete the line "{name}" of SMALL in tests/test_structure.py: it '
        + (f"has {lines[name]} lines of code" if name in lines else "is gone")
        for name in sorted(SMALL.keys() - found)
    ]
    assert problems == [], "\n".join(problems)
