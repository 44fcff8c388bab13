"""The machine is asked in a process; whatever goes wrong there is one clear message."""

import sys

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.machine import probe

pytestmark = pytest.mark.heavy


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_description_becomes_a_machine() -> None:
    answer = (
        '{"device": "cuda", "name": "X", "count": 8, "memory_bytes": 5, "cores": 4, '
        '"hostname": "h"}'
    )
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
