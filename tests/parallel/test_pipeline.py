"""Which schedules a torch can run."""

import pytest
import torch

from shardyard.errors import RequestError
from shardyard.parallel.pipeline import check_self_sends


def test_an_old_torch_refuses_stages_that_send_to_their_own_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    check_self_sends("parallel.schedule=zb-v", "nccl")
    with pytest.raises(RequestError) as refused:
        check_self_sends("parallel.schedule=zb-v", "gloo")
    message = str(refused.value)
    assert message.startswith("parallel.schedule=zb-v on CPUs needs torch 2.12 or newer, and this")
    assert message.endswith("Install a newer torch, or use another schedule.")
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    check_self_sends("parallel.schedule=zb-v", "gloo")
