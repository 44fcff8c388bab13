"""Parts of a script that only a shell can read are rejected by name; plain ones are read."""

from pathlib import Path

import pytest

from tests.importers.configs.test_traps import Files, script

START = "torchrun --nproc_per_node=8 t.py --lr $LR"
NOT_READ: dict[str, tuple[tuple[str, ...], str, int]] = {
    "a loop": (("for LR in 1e-3 1e-4; do", f"  {START}", "done"), "loop", 3),
    "a loop on one line": ((f"for LR in 1e-3 1e-4; do {START}; done",), "loop", 2),
    "options that a loop reads": (
        ("while [[ $# -gt 0 ]]; do", "  case $1 in", "    --lr) LR=$2; shift;;", "  esac", "done"),
        "loop", 4,
    ),
    "a function": (("train() {", "  local LR=1e-4", "}"), "function", 3),
    "a function by its word": (("function train {", f"  {START}", "}", "train"), "function", 3),
    "the other branch": (
        ('if [ -n "$FAST" ]; then', "  LR=1e-3", "else", "  LR=1e-4", "fi"), "branch", 5,
    ),
    "a branch on one line": (("if [ $FAST ]; then export LR=1e-3; fi",), "branch", 2),
    "a case": (('case "$SIZE" in', "  7b) LR=1e-4;;", "esac"), "branch", 3),
    "a test": (('[ -z "$LR" ] && LR=1e-4',), "branch", 2),
    "a start on a condition": ((f"[[ -f t.py ]] && {START}",), "branch", 2),
    "more of an array": (("ARGS+=(--lr 1e-4)",), "append", 2),
    "more of a text": (('export ARGS+=" --lr 1e-4"',), "append", 2),
    "a file that it writes": (("cat > ds.json <<EOF", '{"lr": 1e-4}', "EOF"), "heredoc", 2),
    "a command in a text": (("read -r -d '' cmd <<-'EOF'", START, "EOF"), "heredoc", 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_READ)
def test_what_needs_a_shell_is_rejected_by_name_and_line(tmp_path: Path, kind: str) -> None:
    lines, name, number = NOT_READ[kind]
    imported = (
        Files(tmp_path).add("job.sh", script(*lines, "torchrun --nproc_per_node=2 a.py")).take()
    )
    (problem,) = [str(each) for each in imported.errors if ": shell." in each.path]
    assert f"job.sh, line {number}: shell.{name}: " in problem
    assert "is not read" in problem and f"--without shell.{name}." in problem


def test_a_secret_in_a_loop_is_not_in_its_message(tmp_path: Path) -> None:
    lines = ("for n in 1; do", "  export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz01234567", "done")
    imported = Files(tmp_path).add("job.sh", script(*lines, "torchrun t.py")).take()
    assert imported.errors and "hf_abc" not in f"{imported.errors}{imported.to_json()}"


def test_blocks_that_set_nothing_are_only_said_not_to_be_run(tmp_path: Path) -> None:
    lines = (
        'if [ ! -d "$OUT" ]; then', "  mkdir out", "else", "  echo there", "fi",
        "for node in a b; do scp t.py $node:; done", "usage() { echo usage; exit 1; }",
        '[[ -z "$X" ]] && usage', "N=4", "torchrun --nproc_per_node=$N t.py",
    )  # fmt: skip
    assert Files(tmp_path).add("job.sh", script(*lines)).recipe()["cluster.devices"] == 4


@pytest.mark.parametrize("value", ["$((1 + 2))", "$((8 / N))", "$((2 * UNSET))", "${N[0]}"])
def test_arithmetic_other_than_a_product_is_a_value_that_only_a_shell_knows(
    tmp_path: Path, value: str
) -> None:
    imported = (
        Files(tmp_path)
        .add("job.sh", script("N=3", f"torchrun --nproc_per_node={value} t.py"))
        .take()
    )
    (problem,) = imported.errors
    assert "holds what only a shell would know" in str(problem) and ", line 3" in problem.path


def test_an_array_may_hold_a_command_and_stand_in_a_block(tmp_path: Path) -> None:
    lines = (
        "#SBATCH -N 2", "if [ -n $IMAGE ]; then", "  declare -a BOX=(", "    --label", "  )", "fi",
        "ARGS=(", "  --nproc_per_node=8", "  --rdzv_endpoint=$(hostname):29500", ")",
        'srun "${BOX[@]}" torchrun "${ARGS[@]}" t.py',
    )  # fmt: skip
    assert Files(tmp_path).add("job.sh", script(*lines)).recipe()["cluster.devices"] == 8
