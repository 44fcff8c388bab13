"""Requests of a pod to its node: devices and EFA interfaces from the catalogue, CPU, memory."""

from dataclasses import dataclass

from shardyard.errors import RequestError
from shardyard.hardware import other_vendors
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import Instance, instance, instance_names
from shardyard.launchers.base import LaunchRequest

EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
HUGE_PAGES_MIB = 5120
"""With EFA: what AWS's EKS examples ask; Karpenter's EFA nodes and AWS's images reserve more."""

# Nodes keep some for themselves. A p5.48xlarge offers 191.45 of 192 CPUs and 1,938,410 of 2,097,152
# MiB (92.4 %), a p4d.24xlarge 95.69 of 96 and 91.8 %; log and metric collectors take from that too.
_CPU_SHARE = 0.9
_MEMORY_SHARE = 0.8

MIB = 2**20

_AMD = {row.name for row in other_vendors.ROWS if row.name.startswith("MI")}
_PLUGINS = {"cuda": "nvidia.com/gpu", "hpu": "habana.ai/gaudi"}
"""Kind of device -> resource; for torch AMD is of the kind of NVIDIA, hence the names."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Resources that one pod requests."""

    devices: dict[str, int]
    """Resource name -> number: accelerators and EFA interfaces, given whole to one pod."""
    huge_pages_mib: int
    cpus: int
    memory_mib: int | None

    @property
    def has_efa(self) -> bool:
        """Whether pods talk through EFA."""
        return EFA in self.devices

    def whole(self) -> dict[str, str]:
        """Resources whose request must equal their limit."""
        quantities = {name: str(number) for name, number in self.devices.items()}
        if self.huge_pages_mib:
            quantities[HUGE_PAGES] = f"{self.huge_pages_mib}Mi"
        return quantities

    def requests(self) -> dict[str, str]:
        """Return all requests; CPU and memory have no limit, as a pod has its node for itself."""
        asked = {"cpu": str(self.cpus)}
        if self.memory_mib is not None:
            asked["memory"] = f"{self.memory_mib}Mi"
        return asked | self.whole()


def chosen_instance(request: LaunchRequest) -> Instance | None:
    """The EC2 type of the request's cluster; None: the machines are of another kind."""
    if request.cluster is None or request.cluster.name not in instance_names():
        return None
    return instance(request.cluster.name)


def demand_of(request: LaunchRequest) -> Demand:
    """Return the resources that each pod of a request asks for.

    Raises:
        RequestError: More than a node has, or no device plugin is known for its devices.
    """
    if request.side is not None:
        side = request.recipe.launch.side
        memory_mib = side.memory_gib * 1024
        return Demand(devices={}, huge_pages_mib=0, cpus=side.cpus, memory_mib=memory_mib)
    machine = chosen_instance(request)
    devices: dict[str, int] = {}
    share = 1.0
    accelerator = _accelerator(request)
    if accelerator is not None:
        assert request.cluster is not None
        offered = machine.count if machine else request.cluster.devices_per_node
        if request.devices_per_node > offered:
            raise RequestError(
                f"cluster.devices={request.devices_per_node}, but a node of {request.cluster.name} "
                f"has {offered} x {accelerator.name}. No pod could be scheduled. Use at most "
                f"{offered}, or more cluster.nodes."
            )
        devices[device_resource(accelerator)] = request.devices_per_node
        # A second pod may take the other devices, and needs its part of CPUs and memory.
        share = request.devices_per_node / offered
    efa = _efa_count(request, machine)
    if efa:
        devices[EFA] = efa
    return Demand(
        devices=devices,
        huge_pages_mib=HUGE_PAGES_MIB if efa else 0,
        cpus=_cpus(request, machine, share),
        memory_mib=_memory_mib(request, share),
    )


def device_resource(accelerator: Accelerator) -> str:
    """Return the resource name of an accelerator in its vendor's device plugin.

    Raises:
        RequestError: No plugin is known.
    """
    if accelerator.name in _AMD:
        return "amd.com/gpu"
    name = _PLUGINS.get(accelerator.device)
    if name is None:
        raise RequestError(
            f"{accelerator.name}: it is not known what its device plugin calls it in Kubernetes. "
            "A pod without that resource would get no device. Use NVIDIA, AMD or Gaudi devices."
        )
    return name


def _accelerator(request: LaunchRequest) -> Accelerator | None:
    if request.cluster is None or request.recipe.cluster.device == "cpu":
        return None
    return request.cluster.accelerator


def _efa_count(request: LaunchRequest, machine: Instance | None) -> int:
    asked = request.recipe.launch.kubernetes.efa  # the check holds it against the instance
    if asked == "auto":
        return machine.efa_count if machine else 0
    return asked


def _cpus(request: LaunchRequest, machine: Instance | None, share: float) -> int:
    if machine is not None:
        return max(int(machine.vcpus * _CPU_SHARE * share), 1)
    return request.devices_per_node  # how many CPUs a node has is not known; a process needs one


def _memory_mib(request: LaunchRequest, share: float) -> int | None:
    if request.cluster is None or request.cluster.host_memory_bytes is None:
        return None
    return int(request.cluster.host_memory_bytes / MIB * _MEMORY_SHARE * share)
