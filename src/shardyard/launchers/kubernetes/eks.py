"""Which EKS cluster a context of a kubeconfig is, by the names that its makers give it."""

import re

from shardyard.errors import RequestError

# `aws eks update-kubeconfig` takes the cluster's ARN, eksctl USER@NAME.REGION.eksctl.io.
_FORMS = (
    re.compile(r"arn:aws[a-z-]*:eks:(?P<region>[a-z0-9-]+):\d+:cluster/(?P<name>[A-Za-z0-9_-]+)"),
    re.compile(r".+@(?P<name>[A-Za-z0-9_-]+)\.(?P<region>[a-z0-9-]+)\.eksctl\.io"),
)


def eks_cluster(context: str) -> tuple[str, str]:
    """Region and name.

    Raises:
        RequestError: The context has another name, which says neither.
    """
    for form in _FORMS:
        found = form.fullmatch(context)
        if found is not None:
            return found["region"], found["name"]
    raise RequestError(
        f"launch.kubernetes.context={context!r} does not say which EKS cluster it is, and add-ons "
        "are installed by EKS, not by the cluster. Name the context as `aws eks update-kubeconfig "
        "--name NAME` does (the cluster's ARN), or as eksctl does (USER@NAME.REGION.eksctl.io)."
    )
