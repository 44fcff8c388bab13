"""Which nodes are rented as ``cluster.capacity`` says: by the labels that they have.

Terms are alternatives, the expressions of one must all hold, as in Kubernetes' node affinity.
"""

from typing import Any

from shardyard.config.machines import Capacity

RESERVATION = "shardyard/capacity-reservation"
"""Label of node groups, with the reservation's id: for groups that Karpenter has not made."""

_OF_KARPENTER = "karpenter.k8s.aws/capacity-reservation-id"
"""Source: karpenter.sh, Scheduling, well-known labels."""
_TYPES = {"karpenter.sh/capacity-type": ("spot", "reserved"), "eks.amazonaws.com/capacityType":
          ("SPOT", "CAPACITY_BLOCK")}  # fmt: skip
"""Labels of Karpenter and of EKS's managed node groups, and the values that are not on demand."""

Term = list[dict[str, Any]]


def terms_of(capacity: Capacity) -> list[Term]:
    """What the labels of a node must be."""
    match capacity.kind:
        case "on-demand":  # self-managed groups have neither label
            return [[_one(label, "NotIn", others) for label, others in _TYPES.items()]]
        case "spot":
            return [[_one(label, "In", values[:1])] for label, values in _TYPES.items()]
        case "reservation" | "block":
            ids = (str(capacity.id),)
            return [[_one(label, "In", ids)] for label in (_OF_KARPENTER, RESERVATION)]


def node_affinity(capacity: Capacity) -> dict[str, Any]:
    """The ``affinity`` of a pod that takes such nodes alone."""
    terms = [{"matchExpressions": term} for term in terms_of(capacity)]
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def is_of(capacity: Capacity, labels: dict[str, str]) -> bool:
    """Whether a node with these labels is rented so."""
    return any(all(_holds(one, labels) for one in term) for term in terms_of(capacity))


def _one(label: str, operator: str, values: tuple[str, ...]) -> dict[str, Any]:
    return {"key": label, "operator": operator, "values": list(values)}


def _holds(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    is_in = labels.get(expression["key"]) in expression["values"]
    return is_in if expression["operator"] == "In" else not is_in
