"""Faults of a drill are asked for by one variable, and by nothing that only looks like it."""

import pytest

from shardyard.elastic.faults import read_faults
from shardyard.errors import RequestError
from shardyard.rundir.contracts import FAULTS_VARIABLE as VARIABLE
from shardyard.train.hooks import Faults


def test_without_the_variable_nothing_is_broken() -> None:
    assert read_faults({}) == read_faults({VARIABLE: ""}) == Faults()


def test_steps_are_read_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    faults = read_faults({VARIABLE: "gradient@7,weight@12,gradient@30"})
    assert faults.gradient_steps == frozenset({7, 30})
    assert faults.weight_steps == frozenset({12})
    assert "a drill makes these faults" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["weights@3", "gradient@0", "gradient@3;weight@4", "1", "weight@"])
def test_another_form_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(RequestError, match=r"not a list of faults.*gradient@STEP.*Unset it"):
        read_faults({VARIABLE: text})
