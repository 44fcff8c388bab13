"""The machine is asked in a process; whatever goes wrong there is one clear message."""

import sys

import pytest
from pytest import MonkeyPatch

from shardyard.errors import RequestError
from shardyard.hardware.machine import local_machine, probe

pytestmark = pytest.mark.heavy


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_description_becomes_a_machine() -> None:
    answer = '{"device": "cuda", "name": "X", "count": 8, "memory_bytes": 5}'
    machine = probe(program(f"print('a warning'); print('''{answer}''')"))
    assert (machine.device, machine.count) == ("cuda", 8)


def test_a_failing_driver_is_named_with_its_last_line() -> None:
    code = "import sys; print('driver too old', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RequestError, match=r"exit code 3: driver too old\. .* Try it yourself"):
        probe(program(code))


@pytest.mark.parametrize("code", ["pass", "print('hello')", "print('{}')"])
def test_an_answer_that_describes_no_machine_is_refused(code: str) -> None:
    with pytest.raises(RequestError, match="a description of devices"):
        probe(program(code))


def test_cpu_processes_are_described_as_torch_describes_them_without_it() -> None:
    assert local_machine("cpu") == probe()


def test_a_recipe_for_cpu_processes_does_not_wait_for_torch(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.hardware.machine.probe", lambda: pytest.fail("asked torch"))
    assert local_machine("cpu").device == "cpu"
