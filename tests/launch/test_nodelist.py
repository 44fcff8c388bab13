"""The first host of a list, as `scontrol show hostnames` writes lists out."""

import pytest

from shardyard.errors import RequestError
from shardyard.launch.slurm.nodelist import first_host

# The first of what `scontrol show hostnames LIST` of slurm-client 22.05 answers.
ANSWERS = [
    ("node1", "node1"),
    ("node[1-3,7]", "node1"),
    ("node[01-03]", "node01"),
    ("node[08-11]", "node08"),
    ("a,b1,c[1-2]", "a"),
    ("gpu-[1,3],cpu-x[09-10]", "gpu-1"),
    ("rack[0-1]node[1-2]", "rack0node1"),
    ("p5-dy-p5-48xlarge-[1-2]", "p5-dy-p5-48xlarge-1"),
    ("a[1-90000]b[1-90000]", "a1b1"),
]


@pytest.mark.parametrize(("nodelist", "host"), ANSWERS)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "nodelist", ["", ",", ",a", "n[", "n[]", "n[1-", "n[2-1]", "n[1-x]", "n[1,x]", "n]1", "n[1[2]]"]
)
def test_what_is_no_list_is_shown(nodelist: str) -> None:
    with pytest.raises(RequestError) as caught:
        first_host(nodelist)
    assert repr(nodelist) in str(caught.value)
    assert "scontrol show hostnames" in str(caught.value)
