"""Variables that children of a process do not need: secrets by name, by value and by recipe."""

import pytest

from shardyard.config.secrets import withheld, without_secret_variables

ENVIRON = {
    "HF_TOKEN": "of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "of-the-cloud",
    "MIRROR": "https://me:hunter2@mirror.example.com/simple",
    "MINE": "as the recipe says",
    "PATH": "/usr/bin",
    "LD_LIBRARY_PATH": "/opt/lib",
    "CUDA_VISIBLE_DEVICES": "0,1",
}
PLAIN = {name: ENVIRON[name] for name in ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")}


def test_secrets_are_left_out_and_all_else_is_kept() -> None:
    assert without_secret_variables(ENVIRON, named=["MINE"]) == PLAIN


def test_secrets_are_back_once_the_children_have_started_even_if_one_fails() -> None:
    environ = dict(ENVIRON)
    with pytest.raises(OSError, match="no memory"), withheld(environ, named=["MINE"]) as hidden:
        assert environ == PLAIN and environ | hidden == ENVIRON
        raise OSError("no memory")
    assert environ == ENVIRON
