"""Installed versions against the table: refused, warned about, or fine."""

import pytest

from shardyard.config.compatibility import ENGINES, Engine, check_packages, engines_for
from shardyard.config.schema import Precision, Recipe
from shardyard.errors import RequestError

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
    assert "torchao: 0.19.0 found, >=0.18,<0.19 required" in str(refused.value)
    assert str(refused.value).endswith("python -m pip install 'torchao>=0.18,<0.19'")


def test_this_environment_is_in_range() -> None:
    check_packages(ENGINES)
