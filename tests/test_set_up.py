"""What keeps a worker from starting, told apart from a lost peer."""

import pytest

from shardyard.errors import SetUpError
from shardyard.set_up import describe_set_up_error, translate_set_up_errors

GLOO = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] "
    "ifa != nullptr. Unable to find address for: eth9"
)


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        (GLOO, "GLOO_SOCKET_IFNAME=lo"),
        ("NCCL WARN Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("[enforce fail at device.cc:1] gethostname: File name too long", "the host name"),
        ("CUDA error: invalid device ordinal", "CUDA_VISIBLE_DEVICES"),
        ("Too many open files", "ulimit -n"),
    ],
)
def test_the_setting_is_named(said: str, setting: str) -> None:
    words = describe_set_up_error(said, {"GLOO_SOCKET_IFNAME": "lo"})
    assert words is not None and setting in words


@pytest.mark.parametrize(
    "said",
    [
        "Connection closed by peer [127.0.0.1]:40123",
        "[enforce fail at pair.cc:525] connection reset by peer",
        "Gloo connectFullMesh failed with timed out connecting",
        "some other error",
    ],
)
def test_a_lost_peer_stays_what_it_is(said: str) -> None:
    assert describe_set_up_error(said, {}) is None
    lost = RuntimeError(said)
    with pytest.raises(RuntimeError) as caught, translate_set_up_errors({}):
        raise lost
    assert caught.value is lost


def test_the_error_is_of_a_class_of_its_own() -> None:
    with pytest.raises(SetUpError), translate_set_up_errors({}):
        raise RuntimeError(GLOO)
