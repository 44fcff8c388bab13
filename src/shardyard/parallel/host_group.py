"""A process group for facts in host memory, which ends with the model that it is about.

A gloo group has threads of its own. A script that wraps one model after another would collect them.
"""

import weakref
from contextlib import suppress

import torch.distributed as dist
from torch import nn


def host_group(model: nn.Module) -> dist.ProcessGroup:
    """Make a gloo group of all ranks that ends with the model. All ranks call it together."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    weakref.finalize(model, _end, group).atexit = False
    return group


def _end(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # it has ended with all others
        dist.destroy_process_group(group)
