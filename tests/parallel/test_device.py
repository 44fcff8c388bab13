"""The device seam, asked about the CPU and about an accelerator that it has never heard of."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine, probe
from shardyard.parallel.device import (
    available_device,
    peak_memory_bytes,
    process_group_backend,
    reserved_memory_bytes,
    select_device,
)

DESCRIBED = (
    "import tests.parallel.unseen_accelerator; from runpy import run_module; "
    "run_module('shardyard.parallel.device', run_name='__main__')"
)
ASKED = """
import json, torch
from tests.parallel.unseen_accelerator import asked
from shardyard.parallel.device import *
kind = available_device()
device = select_device(kind, 2)
synchronize(device)
synchronize_stream(device)
print(json.dumps({
    "device": str(device), "backend": process_group_backend(kind), "asked": asked,
    "peak": peak_memory_bytes(device), "reserved": reserved_memory_bytes(device),
}))
"""
JOINED = """
import torch, torch.distributed as dist
import tests.parallel.unseen_accelerator
from shardyard.parallel.device import available_device, process_group_backend
store = dist.HashStore()
backend = process_group_backend(available_device())
dist.init_process_group(backend, store=store, rank=0, world_size=1)
print(dist.get_backend(), dist.group.WORLD._device_types)
"""
ALONE = "from shardyard.parallel.device import process_group_backend as f; f('acme')"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=180
    )


def test_a_machine_without_an_accelerator_is_a_cpu() -> None:
    device = select_device(available_device(), 1)
    assert (device, process_group_backend("cpu")) == (torch.device("cpu"), "gloo")
    assert peak_memory_bytes(device) > 2**20 and reserved_memory_bytes(device) is None


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_collectives_are_those_that_torch_names(kind: str, backend: str) -> None:
    assert process_group_backend(kind) == backend


@pytest.mark.parametrize("kind", ["hpu", "mtia", "no-such-kind"])
def test_a_kind_whose_package_is_not_installed_is_named(kind: str) -> None:
    with pytest.raises(RequestError, match=rf"cluster\.device={kind}: .* Install the vendor's pac"):
        process_group_backend(kind)


@pytest.mark.heavy
def test_an_unseen_accelerator_is_described_like_any_other() -> None:
    machine = probe([sys.executable, "-c", DESCRIBED])
    assert isinstance(machine, Machine)
    assert (machine.device, machine.name, machine.count) == ("acme", "Acme One #0", 4)
    assert machine.memory_bytes == 6 * 2**30


@pytest.mark.heavy
def test_an_unseen_accelerator_answers_all_that_training_asks() -> None:
    answer = run(ASKED)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    assert found["device"] == "acme:2" and found["backend"] == "acmecl"
    assert found["asked"] == ["synchronize acme:2"]  # streams are torch's own
    assert (found["peak"], found["reserved"]) == (3 * 2**30, 4 * 2**30)


@pytest.mark.heavy
def test_training_joins_through_the_collectives_of_its_package() -> None:
    answer = run(JOINED)
    assert answer.returncode == 0, answer.stderr
    assert "acmecl" in answer.stdout and "acme" in answer.stdout


@pytest.mark.heavy
def test_without_collectives_it_is_refused_before_training() -> None:
    answer = run(f"import tests.parallel.unseen_accelerator; {ALONE}", "--without-collectives")
    assert "RequestError: cluster.device=acme: torch knows no process groups" in " ".join(
        answer.stderr.split()
    )
