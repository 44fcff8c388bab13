"""The jobs for GitHub Actions and GitLab on the page of `plan`: their lines run as shown."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs/verbs/plan.md"
SCRIPT = "check-recipes.sh"
FITS = """
model: {preset: llama2-7b}
run: {steps: 300}
optim: {global_batch: 64}
cluster: {instance: p5.48xlarge}
"""
TOO_LARGE = FITS.replace("llama2-7b", "llama3.1-405b")
TOO_DEAR = FITS + "launch: {max_usd: 1}\n"


def _file(name: str) -> str:
    """The block of the page that begins with this name."""
    (block,) = re.findall(rf"```\w+\n# {re.escape(name)}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


def _job(file: str) -> Any:
    return yaml.safe_load(_file(file))


def test_both_jobs_run_the_script_of_the_page() -> None:
    (github,) = _job(".github/workflows/recipes.yml")["jobs"].values()
    assert [step["run"] for step in github["steps"] if "run" in step][-1] == f"bash {SCRIPT}"
    gitlab = _job(".gitlab-ci.yml")["recipes"]
    assert gitlab["script"][-1] == f"bash {SCRIPT}"
    assert gitlab["allow_failure"] == {"exit_codes": [11]}


@pytest.mark.system
@pytest.mark.parametrize(
    ("recipes", "code", "says"),
    [
        ((FITS, TOO_DEAR), 11, "above launch.max_usd=1"),
        ((TOO_LARGE, TOO_DEAR), 10, "the plan does not fit"),
    ],
)
def test_the_script_exits_by_the_most_serious_finding(
    tmp_path: Path, recipes: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "recipes").mkdir()
    for number, recipe in enumerate(recipes):
        (tmp_path / f"recipes/{number}.yaml").write_text(recipe)
    (tmp_path / SCRIPT).write_text(_file(SCRIPT))
    bash = shutil.which("bash")
    assert bash is not None
    scripts = str(Path(sys.executable).parent)
    done = subprocess.run(
        [bash, SCRIPT],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stdout.count("plan: ") == len(recipes)
