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
    "checkpoint/staging_protocol.py": "protocols",
    "cli/report.py": "a verb is the file of its name, loaded when it is called",
    "cli/serve.py": "a verb is the file of its name, loaded when it is called",
    "cli/train.py": "a verb is the file of its name, loaded when it is called",
    "elastic/preload_compiler.py": "the fork server imports it by name before it starts workers",
    "families/images/registry.py": "registry",
    "families/registry.py": "registry",
    "io/sanitize.py": "errors.py imports it, which every package imports",
    "launchers/aws_batch/node_rank.py": "a node imports it by name, without the AWS client",
    "launchers/registry.py": "registry",
    "log.py": "packages of both halves log by it, without click",
    "node/ask_profile.py": "a program: python -m shardyard.node.ask_profile",
    "node/env_entry.py": "a program: python -m shardyard.node.env_entry",
    "remarks.py": "imported for its effect before torch and torchao are",
    "report/compare/line_styles.py": "pages draw the legend by it, without matplotlib",
    "tasks/base.py": "protocol of a task",
}
"""Files with fewer lines of code, each with why it is a file of its own; none may join that is
not a registry, a protocol, a program, or imported where its neighbours may not be."""
NOT_YET = {
    "checkpoint/ema.py",
    "checkpoint/io_priority.py",
    "cluster/existing_spec.py",
    "cluster/fsx_exports.py",
    "cluster/launch_recipe.py",
    "config/allocator.py",
    "config/dataset_name.py",
    "config/globs.py",
    "config/image_classes.py",
    "config/kubernetes_etcd.py",
    "config/model_defaults.py",
    "config/published_pictures.py",
    "config/rules/plan_only.py",
    "config/rules/trainable.py",
    "config/schema/base.py",
    "config/schema/json_schema.py",
    "config/schema/observe.py",
    "config/secret_variables.py",
    "config/task_lookup.py",
    "config/tokenizer_kinds.py",
    "control/go_back.py",
    "control/model_check.py",
    "control/resend.py",
    "control/run_length.py",
    "control/splits.py",
    "control_groups.py",
    "cpu_quota.py",
    "data/byte_ranges.py",
    "data/images/digits.py",
    "data/images/keyed_rng.py",
    "data/in_use.py",
    "data/mixture_manifest.py",
    "data/optional_imports.py",
    "data/rejected.py",
    "data/stores/faulty.py",
    "data/true_pairs.py",
    "doctor/clock.py",
    "doctor/finding.py",
    "elastic/devshm_errors.py",
    "elastic/folder_watch.py",
    "elastic/rendezvous_wait.py",
    "elastic/sealed_objects.py",
    "ending_signals.py",
    "families/images/lookup.py",
    "families/presets.py",
    "given_file.py",
    "importers/checkpoints/torch_save_file.py",
    "io/path_option.py",
    "launchers/aws_batch/ownership.py",
    "launchers/kubernetes/api_versions.py",
    "launchers/kubernetes/network_policy.py",
    "launchers/log_files.py",
    "launchers/shell_quoting.py",
    "library/termination.py",
    "models/grad_scale.py",
    "models/inputs.py",
    "models/submodules.py",
    "node/log_markers.py",
    "parallel/host_group.py",
    "parallel/model.py",
    "parallel/step_counters.py",
    "planner/checkpoint_size.py",
    "planner/memory_savings.py",
    "planner/reliefs.py",
    "python_program.py",
    "tasks/lookup.py",
    "tasks/loss_computation.py",
    "train/earlier_step.py",
    "train/router_watch.py",
}
"""Files with fewer lines of code that no reason was found for; this set may only shrink."""


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
        for name in sorted(found - SMALL.keys() - NOT_YET)
    ]
    problems += [
        f'delete the line "{name}" of {where} in tests/test_structure.py: it '
        + (f"has {lines[name]} lines of code" if name in lines else "is gone")
        for where, names in (("SMALL", SMALL.keys()), ("NOT_YET", NOT_YET))
        for name in sorted(names - found)
    ]
    problems += [
        f'delete the line "{name}" of NOT_YET in tests/test_structure.py: SMALL has its reason'
        for name in sorted(SMALL.keys() & NOT_YET)
    ]
    assert problems == [], "\n".join(problems)
