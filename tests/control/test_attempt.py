"""A run on this machine: what is wrong is told before anything is tokenised."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.control import attempt
from shardyard.control import attempt as prepare
from shardyard.hardware.machine import Machine

NODE = Machine(
    device="cuda", name="a GPU", count=4, memory_bytes=2**36, cores=96, hostname="node",
    has_bf16=False,
)  # fmt: skip


class Tokenised(Exception):  # noqa: N818 - it is what a test must not see
    """Text was about to be read."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tokenise(*_: object, **__: object) -> None:
        raise Tokenised

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attempt, "local_machine", lambda _device: NODE)
    monkeypatch.setattr(prepare, "run_program", tokenise)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.seq_len=512"], "data.seq_len=512 is more than the model's context of 256 tokens."),
        (["parallel.tp=4"], "parallel.tp=4 does not divide the model's 4 heads and 2 key-value"),
        (["parallel.pp=5", "cluster.devices=5"], "parallel.pp=5 is more stages than the model has"),
        (["parallel.dp_shard=3"], "parallel.dp_shard=3 does not divide the 4 data-parallel ranks."),
        (["parallel.cp=2", "data.seq_len=254"], "parallel.cp=2 needs samples of a multiple of 4"),
        (["memory.recompute=[mlp, atention]"], "names the module 'atention', which no block has."),
        (["cluster.devices=5"], "cluster.devices=5 but node has 4 x a GPU."),
        (["precision.compute=fp8"], "precision.compute=fp8 but a GPU does not multiply fp8"),
        (["precision.compute=bf16"], "precision.compute=bf16: a GPU has no bf16 products"),
        (["cluster.device=xpu"], "cluster.device=xpu but node has only 4 x a GPU (cuda)."),
        (["optim.global_batch=2"], "optim.global_batch=2 is fewer samples than the 4 data-par"),
        (
            ["task.name=masked_lm"],
            "task.name=masked_lm: in llama-tiny a token sees only earlier tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_tokenised(
    settings: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "model.preset=llama-tiny", *settings]) == 2
    assert words in capsys.readouterr().err


def test_what_fits_is_tokenised_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model.preset=llama-tiny"]) == 1
    assert "Tokenised" in capsys.readouterr().err
