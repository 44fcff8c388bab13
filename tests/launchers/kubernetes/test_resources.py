"""Devices and EFA interfaces come from the catalogue; CPU and memory leave the node its share."""

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import accelerator_by_name, instance, instance_names
from shardyard.launchers.kubernetes.objects import render_objects
from shardyard.launchers.kubernetes.resources import demand_of, device_resource
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.kubernetes.schemas import pod_of

RESOURCES = {"dl1": "habana.ai/gaudi"}
"""By family; all others have NVIDIA devices."""
TRAINABLE = [n for n in instance_names() if instance(n).accelerator.device != "xla"]


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
@pytest.mark.parametrize("name", TRAINABLE)
def test_every_instance_type_asks_for_what_the_catalogue_says(name: str, target: str) -> None:
    machine = instance(name)
    request = request_for(f"cluster.instance={name}", f"launch.kubernetes.target={target}")
    (container,) = pod_of(render_objects(request))["spec"]["containers"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    device = RESOURCES.get(name.partition(".")[0], "nvidia.com/gpu")
    assert requests[device] == limits[device] == str(machine.count)
    efa = str(machine.efa_count) if machine.efa_count else None
    assert requests.get("vpc.amazonaws.com/efa") == limits.get("vpc.amazonaws.com/efa") == efa
    assert ("hugepages-2Mi" in limits) == (machine.efa_count > 0)
    assert int(requests["cpu"]) < machine.vcpus
    assert int(requests["memory"].removesuffix("Mi")) * 2**20 < machine.host_memory_bytes


# Allocatable of a node without any pod, as AWS's nodes report it.
@pytest.mark.parametrize(
    ("name", "millicpus", "memory_mib"),
    [("p5.48xlarge", 191_450, 1_938_410), ("p4d.24xlarge", 95_690, 1_082_712)],
)
def test_cpu_and_memory_fit_what_a_node_offers(name: str, millicpus: int, memory_mib: int) -> None:
    demand = demand_of(request_for(f"cluster.instance={name}"))
    assert demand.cpus * 1000 < millicpus
    assert demand.memory_mib is not None
    assert demand.memory_mib + demand.huge_pages_mib < memory_mib


def test_a_part_of_a_node_asks_for_a_part_of_its_cpu_and_memory() -> None:
    whole, half = demand_of(request_for()), demand_of(request_for("cluster.devices=4"))
    assert half.devices["nvidia.com/gpu"] == 4
    assert half.cpus == whole.cpus // 2
    assert half.memory_mib is not None and whole.memory_mib is not None
    assert half.memory_mib == whole.memory_mib // 2


# Scenario: an experiment compares 4, 1 and 0 EFA interfaces of a p4d.
@pytest.mark.parametrize("efa", [4, 1, 0])
def test_an_experiment_may_take_fewer_efa_interfaces(efa: int) -> None:
    request = request_for("cluster.instance=p4d.24xlarge", f"launch.kubernetes.efa={efa}")
    demand = demand_of(request)
    assert demand.devices.get("vpc.amazonaws.com/efa", 0) == efa
    assert demand.has_efa == (efa > 0)


def test_more_devices_than_a_node_has_are_refused() -> None:
    with pytest.raises(RequestError, match=r"devices=16, but a node of p5.48xlarge has 8"):
        demand_of(request_for(devices_per_node=16))


def test_processes_on_cpus_ask_for_no_device() -> None:
    demand = demand_of(request_for("cluster.instance=null", "cluster.device=cpu"))
    assert demand.devices == {}
    assert demand.requests() == {"cpu": "1"}


def test_vendors_plugins_are_told_apart() -> None:
    assert device_resource(accelerator_by_name("MI300X")) == "amd.com/gpu"
    assert device_resource(accelerator_by_name("H200")) == "nvidia.com/gpu"
    assert device_resource(accelerator_by_name("Gaudi3")) == "habana.ai/gaudi"


@pytest.mark.parametrize(
    "accelerator",
    [accelerator_by_name("TPU v5e"), Accelerator(name="Max 1550", memory_bytes=1, device="xpu")],
)
def test_a_device_whose_plugin_is_not_known_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(RequestError, match="it is not known what its device plugin calls it"):
        device_resource(accelerator)
