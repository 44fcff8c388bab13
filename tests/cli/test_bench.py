"""`shardyard bench network`: submitted like a training, its tables shown, its verdict the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from shardyard.bench.nccl_table import CollectiveTiming
from shardyard.bench.transports import variants_in
from shardyard.cli import main
from shardyard.control.bench import Answers, SideBySide
from shardyard.errors import RequestError
from shardyard.launchers.base import JobState, LogLine
from shardyard.launchers.ledger import Submission
from shardyard.rundir.network import BENCH_VARIABLE, NetworkBench
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import status

Captured = pytest.CaptureFixture[str]
ROW: dict[str, Any] = {
    "bench": "row", "collective": "all_reduce", "size_bytes": 8, "count": 2, "out_s": 1e-4,
    "out_wrong": 0, "in_s": 2e-4, "in_wrong": 0,
}  # fmt: skip
RANKS: dict[str, Any] = {"bench": "ranks", "ranks": 2, "nodes": ["a", "b"]}
DONE: dict[str, Any] = {"bench": "done"}


class Measuring(FakeLauncher):
    """Its node 0 says what it is told to."""

    said: tuple[dict[str, Any] | str, ...] = ()

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        assert node == 0 and follow
        yield from super().logs(job, node=node, follow=follow)
        for each in self.said:
            text = each if isinstance(each, str) else self.marked("answer", each)
            yield LogLine(source="node 0", text=text)


def bench(folder: Path, launcher: FakeLauncher, *words: str) -> int:
    recipe = ["model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=1"]
    recipe += ["cluster.nodes=3" if "--pairs" in words else "cluster.nodes=2"]
    given = [f"run.dir={folder / 'runs'}", "run.id=first", *recipe]
    words = ("bench", "network", *given, "--on", "fake", *words)
    return main(words, launchers={"fake": launcher})


def measuring(*said: dict[str, Any] | str, state: JobState = JobState.SUCCEEDED) -> Measuring:
    made = Measuring(statuses=[status(state)])
    made.said = said
    return made


def test_what_is_asked_reaches_the_nodes_in_a_variable(tmp_path: Path, capsys: Captured) -> None:
    fake = measuring()
    assert bench(tmp_path, fake, "--dry-run", "--end", "64K", "--collective", "alltoall") == 0
    (request,) = fake.submitted
    asked = NetworkBench.from_text(request.environment[BENCH_VARIABLE])
    assert asked.collectives == ("alltoall",) and asked.processes == 1
    assert list(asked.sizes())[-1] == 64 * 1024
    said = capsys.readouterr().err
    assert "bench network: run first" in said
    assert "measured: alltoall: 8 B to 64.0 KiB, 20 calls each" in said
    assert not (tmp_path / "runs").exists()


def test_tables_are_the_answer_and_all_else_is_talk(tmp_path: Path, capsys: Captured) -> None:
    fake = measuring(RANKS, "# Using devices", "x [0] NCCL INFO Using network IB", ROW, DONE)
    assert bench(tmp_path, fake, "--yes") == 0
    captured = capsys.readouterr()
    assert captured.out == "# Using devices\n"
    assert "Using network IB" in captured.err and "@shardyard" not in captured.err


def test_json_has_every_row_with_its_bus_bandwidth(tmp_path: Path, capsys: Captured) -> None:
    assert bench(tmp_path, measuring(RANKS, "# x", ROW, DONE), "--yes", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ranks"] == 2 and content["nodes"] == ["a", "b"]
    assert content["rows"][0]["out_busbw_gbs"] == pytest.approx(8 / 1e-4 / 1e9)
    assert content["average_busbw_gbs"]["all_reduce"] == pytest.approx(6e-5)
    assert content["wrong_values"] == 0 and content["slow_nodes"] == []


def test_a_job_that_was_started_again_is_measured_anew(tmp_path: Path, capsys: Captured) -> None:
    fake = measuring(RANKS, {**ROW, "out_wrong": 5}, RANKS, ROW, DONE)
    assert bench(tmp_path, fake, "--yes", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1


def test_wrong_values_and_slow_nodes_are_told_by_the_exit_code(
    tmp_path: Path, capsys: Captured
) -> None:
    wrong = measuring(RANKS, {**ROW, "in_wrong": 1}, DONE)
    assert bench(tmp_path / "wrong", wrong, "--yes") == 1
    three = {**RANKS, "ranks": 3, "nodes": ["a", "b", "c"]}
    pairs = [
        {"bench": "pair", "a": a, "b": b, "busbw_gbs": 1.0 if b == 2 else 9.0}
        for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    slow = measuring(three, *pairs, DONE)
    assert bench(tmp_path / "slow", slow, "--yes", "--json", "--pairs") == 1
    assert json.loads(capsys.readouterr().out)["slow_nodes"] == ["c"]
    sound = measuring(three, *[{**pair, "busbw_gbs": 9.0} for pair in pairs], DONE)
    assert bench(tmp_path / "sound", sound, "--yes", "--pairs") == 0


def test_a_failure_of_the_nodes_is_that_of_the_command(tmp_path: Path, capsys: Captured) -> None:
    failed = {"bench": "failed", "error": "port 29400 on a is in use.", "exit_code": 2}
    fake = measuring(RANKS, failed, state=JobState.FAILED)
    assert bench(tmp_path, fake, "--yes") == 2
    assert "error: port 29400 on a is in use." in capsys.readouterr().err


def test_a_job_that_ends_without_a_word_says_where_to_look(
    tmp_path: Path, capsys: Captured
) -> None:
    assert bench(tmp_path, measuring(RANKS, ROW, state=JobState.CANCELLED), "--yes") == 1
    said = capsys.readouterr().err
    assert "did not measure all" in said and "shardyard logs " in said


@pytest.mark.parametrize(
    "words",
    [
        ["resume", "--yes"],
        ["scale", "3", "--yes"],
        ["export", "--to", "out"],
        ["fetch", "--to", "out"],
    ],
    ids=lambda words: words[0],
)
def test_the_folder_of_a_benchmark_is_no_training(
    tmp_path: Path, capsys: Captured, words: list[str]
) -> None:
    fake = measuring(RANKS, ROW, DONE)
    assert bench(tmp_path, fake, "--yes") == 0
    submitted = len(fake.submitted)
    verb, *options = words
    place = ["--runs-dir", str(tmp_path / "runs")]
    assert main([verb, "first", *options, *place], launchers={"fake": fake}) == 2
    said = capsys.readouterr().err
    assert "run first is a benchmark (bench network) which does not train and has " in said
    assert "`shardyard bench network RECIPE --on LAUNCHER` measures again" in said
    assert len(fake.submitted) == submitted and not fake.scaled


def test_slurm_and_pods_are_given_the_same_variable(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ["model.preset=llama-tiny", "cluster.instance=p5.48xlarge", "cluster.nodes=2"]
    words = ["bench", "network", *recipe, "--dry-run", "--on"]
    assert main([*words, "slurm"]) == 0
    assert f"{BENCH_VARIABLE}=" in capsys.readouterr().out
    volume = "launch.volumes=[{path: /shared, claim: shared}]"
    paths = ["launch.run_dir=/shared/runs", "launch.image=x@sha256:" + 64 * "0"]
    paths += ["data.source=/shared/text", "data.tokenizer=train", volume]
    assert main([*words[:-2], *paths, "--dry-run", "--on", "kubernetes"]) == 0
    text = capsys.readouterr().out
    jobs = [each for each in yaml.safe_load_all(text) if each["kind"] == "JobSet"]
    assert BENCH_VARIABLE in json.dumps(jobs) and '"vpc.amazonaws.com/efa"' in json.dumps(jobs)


class Networks(Measuring):
    """Each job says that it used the interface that it was given, but for what ``wrong`` says."""

    wrong: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def logs(self, job: Submission, *, node: int | None, follow: bool) -> Iterator[LogLine]:
        named = self.submitted[-1].environment["GLOO_SOCKET_IFNAME"]
        used = "lo" if named in self.wrong else named
        network = {"bench": "network", "transport": "sockets", "said_by": "gloo", "attempt": 0}
        fast = {**ROW, "out_s": ROW["out_s"] / 2, "in_s": ROW["in_s"] / 2}
        row = fast if named == "eth0" else ROW
        end = {"bench": "failed", "error": f"{named} is down.", "exit_code": 2}
        self.said = (
            RANKS, row, {**network, "interfaces": used}, end if named in self.failing else DONE
        )  # fmt: skip
        return super().logs(job, node=node, follow=follow)


def networks(*, wrong: tuple[str, ...] = (), failing: tuple[str, ...] = ()) -> Networks:
    made = Networks(statuses=[status(JobState.SUCCEEDED)])
    made.wrong, made.failing = wrong, failing
    return made


BOTH = ("--transports", "sockets:eth0,sockets:eth1", "--yes")


def test_transports_are_a_job_each_and_one_table(tmp_path: Path, capsys: Captured) -> None:
    assert bench(tmp_path, networks(), *BOTH) == 0
    out = capsys.readouterr().out
    assert "sockets:eth0  sockets:eth1  sockets:eth1/sockets:eth0" in out
    assert "0.500\n" in out and "# sockets:eth1: network used: TCP sockets (eth1)" in out
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == [
        "first-sockets-eth0", "first-sockets-eth1"
    ]  # fmt: skip


def test_a_network_that_was_not_used_makes_the_comparison_fail(
    tmp_path: Path, capsys: Captured
) -> None:
    assert bench(tmp_path / "a", networks(wrong=("eth1",)), *BOTH) == 1
    said = "# sockets:eth1: network used: TCP sockets (lo): NOT the requested one"
    assert said in capsys.readouterr().out
    assert bench(tmp_path / "b", networks(wrong=("eth1",)), *BOTH, "--json") == 1
    content = json.loads(capsys.readouterr().out)
    assert [each["is_used"] for each in content["transports"]] == [True, False]
    ratios = content["side_by_side"][0]["ratios"]
    assert ratios == {"sockets:eth1": pytest.approx(0.5)}


def test_one_network_that_fails_costs_no_other_its_answer(tmp_path: Path, capsys: Captured) -> None:
    assert bench(tmp_path, networks(failing=("eth0",)), *BOTH) == 2
    captured = capsys.readouterr()
    assert "error: sockets:eth0: eth0 is down." in captured.err
    assert "# sockets:eth1: network used: TCP sockets (eth1)" in captured.out


def test_jobs_of_different_sizes_are_not_held_against_each_other() -> None:
    job, rows = (
        cast(Any, None),
        [CollectiveTiming(**{k: v for k, v in ROW.items() if k != "bench"})],
    )
    first, second = variants_in("efa,sockets")
    pair = {first: (job, Answers(ranks=2, rows=rows)), second: (job, Answers(ranks=4, rows=rows))}
    with pytest.raises(RequestError, match=r"different numbers of ranks .* all nodes of each"):
        print(SideBySide(measured=pair).rates)


def test_pods_are_given_all_interfaces_or_one_or_sockets(tmp_path: Path, capsys: Captured) -> None:
    volume = "launch.volumes=[{path: /shared, claim: shared}]"
    words = ["model.preset=llama-tiny", "cluster.instance=p5.48xlarge", "cluster.nodes=2", volume]
    words += ["launch.run_dir=/shared/runs", "launch.image=x@sha256:" + 64 * "0", "run.id=n"]
    words += ["data.source=/shared/text", "data.tokenizer=train", f"run.dir={tmp_path}"]
    asked = ["--transports", "efa,one-efa,sockets", "--dry-run", "--json", "--on", "kubernetes"]
    assert main(["bench", "network", *words, *asked]) == 0
    every = json.loads(capsys.readouterr().out)
    assert [each["run_id"] for each in every] == ["n-efa", "n-one-efa", "n-sockets"]
    texts = [json.dumps(each["objects"]) for each in every]
    counts = [re.findall(r'"vpc.amazonaws.com/efa": "?(\d+)', text)[0] for text in texts]
    assert counts == ["32", "1", "32"]
    assert ['"NCCL_NET"' in text for text in texts] == [False, False, True]


def test_what_another_version_asks_is_refused() -> None:
    with pytest.raises(RequestError, match="is not a benchmark of this version of Shardyard"):
        NetworkBench.from_text('{"collectives": ["all_reduce"], "colour": "red"}')
