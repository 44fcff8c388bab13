"""The example notebook, its code cells run in order as a kernel runs them."""

import ast
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import shardyard

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown_values(notebook: Path) -> tuple[dict[str, Any], list[Any]]:
    """Run the code cells; return their names, and the value of each cell's last expression."""
    names: dict[str, Any] = {}
    values = []
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), filename=f"cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
            values.append(value)
    return names, values


@pytest.mark.system
def test_the_notebook_plans_trains_and_compares_three_learning_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first-sweep.ipynb", "chat-small.yaml", "dialogues.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    began_s = time.monotonic()
    names, (plan, result, metrics, comparison, best) = shown_values(tmp_path / "first-sweep.ipynb")
    print(time.monotonic() - began_s)
    assert "llama-tiny" in plan._repr_html_() and "Training loss" in result._repr_html_()
    assert [line["step"] for line in metrics] == list(range(1, 21))
    rows = comparison.rows()
    assert [row["optim.lr"] for row in rows] == ["0.001", "0.01", "0.05"]
    assert best == min(rows, key=lambda row: row["eval_loss"])["run"]
    assert best == min(names["results"], key=lambda each: each.summary.eval_loss).summary.run_id
    page = comparison._repr_html_()
    assert page.count("<svg") == 2 and page.count("<polyline") == 6
    assert all(f"optim.lr={rate}" in page for rate in ("0.001", "0.01", "0.05"))
    assert {run.id for run in shardyard.runs("runs")} == {"first", "lr-0.001", "lr-0.01", "lr-0.05"}
