"""Installed versions against the table: refused, warned about, or fine."""

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu.run import NEEDED
from shardyard.config.schema.observe import Observe
from shardyard.config.schema.recipe import Parallel, Precision, Recipe
from shardyard.config.versions import (
    ENGINES,
    OPTIONAL,
    TORCH,
    Engine,
    check_packages,
    engines_for,
)
from shardyard.errors import RequestError

ROOT = Path(__file__).parents[2]
OF_TRAINING = ("fp8", "mlflow", "plots", "prometheus", "tensorboard", "wandb")
"""Extras of which the oldest versions are known."""
TABLE = (
    Engine(package="torch", at_least="2.11", below="3", tested=("2.13.0",), note=""),
    Engine(package="numpy", at_least="1.26", tested=(), note=""),
)


def found(**versions: str | None) -> list[str]:
    return check_packages(TABLE, lambda package: versions.get(package))


def test_a_tested_version_is_fine_whatever_its_build() -> None:
    assert found(torch="2.13.0+cpu", numpy="2.4.6") == []


def test_an_untested_version_is_a_warning() -> None:
    assert found(torch="2.14.1", numpy="2.0") == [
        "torch 2.14.1 was not tested with this version of shardyard (tested: 2.13.0)"
    ]


@pytest.mark.parametrize("version", ["2.9.1", "3.0.0", None])
def test_a_version_out_of_range_is_refused_with_what_to_install(version: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        found(torch=version, numpy="1.0")
    message = str(refused.value)
    assert f"torch: {version or 'none'} found, >=2.11,<3 required" in message
    assert "numpy: 1.0 found, >=1.26 required" in message
    assert message.endswith("python -m pip install 'torch>=2.11,<3' 'numpy>=1.26'")


def test_torchao_is_wanted_by_fp8_alone() -> None:
    assert engines_for(Recipe()) == ENGINES
    engines = engines_for(Recipe(precision=Precision(compute="fp8")))
    versions = {"torchao": "0.19.0", "torch": "2.13.0"}
    with pytest.raises(RequestError) as refused:
        check_packages(engines[-1:], versions.get)
    assert "torchao: 0.19.0 found, >=0.18,<0.19 required by precision.compute=fp8" in str(
        refused.value
    )
    assert str(refused.value).endswith("python -m pip install 'torchao>=0.18,<0.19'")


def test_tensorboard_is_wanted_by_its_setting_alone() -> None:
    engines = engines_for(Recipe(observe=Observe(tensorboard=True)))
    versions: dict[str, str] = {engine.package: engine.at_least for engine in ENGINES}
    with pytest.raises(RequestError) as refused:
        check_packages(engines, versions.get)
    assert "tensorboard: none found, >=2.17 required by observe.tensorboard=true" in str(
        refused.value
    )
    assert str(refused.value).endswith("python -m pip install 'tensorboard>=2.17'")


def test_experts_over_several_ranks_want_a_torch_that_can_place_them() -> None:
    engines = engines_for(Recipe(parallel=Parallel(ep=2)))
    versions: dict[str, str] = {engine.package: engine.at_least for engine in ENGINES}
    with pytest.raises(RequestError) as refused:
        check_packages(engines, versions.get)
    assert "torch: 2.11 found, >=2.12,<2.16 required by parallel.ep above 1" in str(refused.value)
    assert [engine.package for engine in engines] == [engine.package for engine in ENGINES]
    check_packages(engines_for(Recipe()), versions.get)


def test_the_least_versions_are_those_that_the_tests_run_with() -> None:
    least = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text(), re.M)
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_training = [text for name in OF_TRAINING for text in extras[name]]
    for dependency in [*project["dependencies"], *of_training]:
        name, _, bounds = dependency.partition(">=")
        assert _is_release_of(least[name], bounds.split(",")[0]), dependency
    for engine in (*ENGINES, *OPTIONAL):
        assert _is_release_of(least[engine.package], engine.at_least), engine
    for name, bound in NEEDED.items():
        if name in least:  # others come with these
            assert _is_release_of(least[name], bound), name


def test_pip_is_told_the_same_bounds_of_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={TORCH.at_least},<{TORCH.below}" in project["dependencies"]


def _is_release_of(version: str, bound: str) -> bool:
    """``2.11.0`` is one of ``2.11``: the first that the bound lets in."""
    return version == bound or version == f"{bound}.0"


def test_this_environment_is_in_range() -> None:
    check_packages(ENGINES)
