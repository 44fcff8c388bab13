"""What ``import shardyard`` offers, and what it costs."""

import subprocess
import sys

import pytest

import shardyard
from shardyard.config.schema.reference import settings
from shardyard.library.model import ParallelizeOptions
from shardyard.library.supported import _SECTIONS


@pytest.mark.heavy
def test_importing_the_package_imports_no_engine() -> None:
    engines = "{'torch', 'transformers', 'pydantic'}"
    look = f"import sys, shardyard; print(sorted({engines} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_says_what_it_does() -> None:
    assert sorted(shardyard.__all__) == shardyard.__all__
    for name in shardyard.__all__:
        assert getattr(shardyard, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        shardyard.paralelize  # noqa: B018


def test_settings_are_those_of_a_recipe() -> None:
    assert ParallelizeOptions.__annotations__.keys() == _SECTIONS.keys()
    for name, section in _SECTIONS.items():
        assert f"{section}.{name}" in settings()
