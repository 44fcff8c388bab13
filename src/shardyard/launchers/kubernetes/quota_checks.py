"""The namespace's quotas against what all pods of a run ask together."""

import re
from collections.abc import Iterator

from shardyard.doctor.finding import Finding
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.names import TARGETS
from shardyard.launchers.kubernetes.resources import demand_of

_SUFFIXES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)},
}  # fmt: skip
# 1E is an exabyte and 1e3 a thousand: an exponent has digits.
_QUANTITY = re.compile(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)([A-Za-z]{0,2})")


def quantity(text: str) -> float:
    """Return the number that a quantity such as 500m, 2Ti or 1e3 means."""
    found = _QUANTITY.fullmatch(text.strip())
    assert found is not None, f"{text!r} is not a quantity of Kubernetes"
    return float(found[1]) * _SUFFIXES[found[2]]


def check_quota(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    """Whether each quota has room: for ever too small is a problem, used up now a warning."""
    quotas = api.in_namespace("ResourceQuota")
    asked = _requested(request)
    troubles = []
    for quota in quotas:
        name = quota["metadata"]["name"]
        status = quota.get("status", {})
        # A quota that was just made has no status yet.
        for resource, text in (status.get("hard") or quota["spec"].get("hard", {})).items():
            used = (status.get("used") or {}).get(resource, "0")
            if resource.startswith("limits.") and resource.removeprefix("limits.") in _UNLIMITED:
                troubles.append(_wants_limits(name, resource))
            elif resource in asked and quantity(used) + asked[resource] > quantity(text):
                is_never = asked[resource] > quantity(text)
                wanted = f"{asked[resource]:g}"
                what = f"quota {name}: the run asks {wanted} of {resource}; {text} are allowed"
                what += "" if is_never else f", of which {used} are in use"
                mend = "Use fewer cluster.nodes, or have the quota raised"
                mend = mend if is_never else "It waits until others end, or " + mend.lower()
                troubles.append(
                    Finding(
                        name="quota",
                        verdict="problem" if is_never else "warning",
                        what=what,
                        mend=mend,
                    )
                )
    what = f"{len(quotas)} quotas have room" if quotas else "the namespace has none"
    yield from troubles or [Finding(name="quota", verdict="ok", what=what)]


_UNLIMITED = ("cpu", "memory")
"""Resources without a limit in our pods: each pod has a node for itself."""


def _wants_limits(quota: str, resource: str) -> Finding:
    return Finding(
        name="quota",
        verdict="warning",
        what=(
            f"quota {quota} counts {resource}, and our pods have no such limit: without a "
            "LimitRange that gives one they are rejected"
        ),
        mend="Have it count requests, or a LimitRange added",
    )


def _requested(request: LaunchRequest) -> dict[str, float]:
    """Return the requests by the names that quotas give them; a plain name means the request."""
    kind = TARGETS[request.recipe.launch.kubernetes.target].kind
    version, plural, _ = PLURALS[kind]
    nodes = request.nodes
    found = {
        "pods": float(nodes), "count/pods": float(nodes),
        f"count/{plural}.{version.partition('/')[0]}": 1.0,
    }  # fmt: skip
    for resource, text in demand_of(request).requests().items():
        found[resource] = found[f"requests.{resource}"] = quantity(text) * nodes
    return found
