"""Imports of an agent and of a fork server: nothing that no process of a plain run uses."""

import subprocess
import sys

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.elastic.forkserver import preload_of

EXTRAS = {
    "PIL", "backports.zstd", "boto3", "botocore", "h5py", "kubernetes", "matplotlib", "mlflow",
    "prometheus_client", "pyarrow", "tensorboard", "torchao", "wandb",
}  # fmt: skip
"""Modules of the extras in pyproject.toml."""

pytestmark = pytest.mark.heavy


def run(code: str) -> list[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_agent_imports_no_engine_but_torch_and_of_that_no_shape_inference() -> None:
    unused = EXTRAS | {"accelerate", "transformers", "torch._decomp", "torch._dynamo", "sympy"}
    found, loaded_late, shape = run(
        "import sys\n"
        "from shardyard.elastic.__main__ import skip_shape_inference\n"
        "skip_shape_inference()\n"
        "import shardyard.elastic.agent, shardyard.elastic.peer_snapshots\n"
        "import shardyard.elastic.worker\n"
        f"print(sorted({unused} & set(sys.modules)))\n"
        "from torch._meta_registrations import register_meta\n"
        "print(register_meta.__name__)\n"
        "import torch\n"
        "print(torch.empty(2, 3, device='meta').add(1).shape)\n"
    )
    assert found == "[]"
    assert (loaded_late, shape) == ("register_meta", "torch.Size([2, 3])")


def test_a_fork_server_imports_no_extra_and_needs_none() -> None:
    recipe = Recipe.model_validate({"model": {"preset": "llama-tiny"}})
    (found,) = run(
        "import importlib, sys\n"
        "from shardyard.elastic.forkserver import _HIDDEN, _hidden\n"
        f"with _hidden({sorted(EXTRAS | {'accelerate'})}):\n"  # as where no extra is installed
        f"    for module in {preload_of(recipe)}:\n"
        "        importlib.import_module(module)\n"
        f"print(sorted({EXTRAS | {'accelerate'}} & set(sys.modules)), *_HIDDEN)\n"
    )
    assert found == "[] accelerate torchao"


def test_only_a_recipe_in_fp8_preloads_torchao() -> None:
    fp8 = {"model": {"preset": "llama-tiny"}, "precision": {"compute": "fp8"}}
    assert "shardyard.parallel.float8" in preload_of(Recipe.model_validate(fp8))
    assert "shardyard.parallel.float8" not in preload_of(Recipe.model_validate({}))
