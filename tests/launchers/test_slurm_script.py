"""The batch script, read as text and run by bash; whether Slurm takes it: test_slurm.py."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.launchers.slurm.script import exported_names, render_script
from tests.launchers.slurm_request import CASES, SIDE, golden_request, slurm_request

GOLDEN = Path(__file__).parent / "golden" / "slurm"
NASTY = 'it\'s a "$HOME" `id` %j; rm -rf $(pwd) & #'


def _directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _printed(script: str, what: str, **environment: str) -> str:
    """What a line prints in the script's place of the program that it starts."""
    return _printed_bytes(script, what, **environment).decode()


def _printed_bytes(script: str, what: str, **environment: str) -> bytes:
    head, _, _ = script.partition("\nnewest()")
    done = subprocess.run(
        ["bash", "-c", f"{head}\n{what}"],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **environment},
        capture_output=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_the_golden_one(name: str) -> None:
    """UPDATE_GOLDEN=1 writes it instead."""
    file = GOLDEN / f"{name}.sbatch"
    script = render_script(golden_request(name))
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(script)
    assert file.read_text() == script


@pytest.mark.heavy
def test_options_of_a_login_shell_are_unset_and_what_slurm_sets_is_not() -> None:
    script = render_script(golden_request(next(iter(CASES))))
    foreign = ("SLURM_CLUSTERS", "SCANCEL_STATE", "SRUN_CONTAINER", "SLURM_HINT", "SLURMD_DEBUG")
    own = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_CONF", "SLURM_MEM")
    printed = _printed(script, 'echo "${!S@}"', **dict.fromkeys((*foreign, *own), "1")).split()
    assert not {*foreign} & {*printed} and {*own} <= {*printed}


@pytest.mark.parametrize(
    ("overrides", "is_shared"),
    [
        ((), True),
        (("launch.slurm.python=/opt/venv/bin/python",), False),
        (("launch.slurm.container_image=/images/it.sqsh",), False),
    ],
)
def test_nodes_have_the_python_that_submits_unless_told_otherwise(
    overrides: tuple[str, ...], is_shared: bool
) -> None:
    request = slurm_request(*overrides)
    assert SlurmLauncher().shares_python(request.recipe) is is_shared
    assert (f"{sys.executable} -P -m" in render_script(request)) is is_shared


OPTIONS = (
    "launch.slurm.options={exclude: 'n[1-2]', nodelist: n7, reservation: ours, gres: 'nvme:1', "
    "switches: 1, contiguous: true, nice: 5, auto-resume: 1}"
)


def test_options_of_the_recipe_reach_sbatch_and_those_of_hyperpod_srun() -> None:
    script = render_script(slurm_request("cluster.instance=p5.48xlarge", OPTIONS))
    asked = _directives(script)
    wanted = {
        "exclude": "'n[1-2]'", "nodelist": "n7", "reservation": "ours", "gres": "nvme:1",
        "switches": "1", "contiguous": "", "nice": "5",
    }  # fmt: skip
    assert wanted.items() <= asked.items() and asked["gpus-per-node"] == "8"
    assert "auto-resume" not in asked and " --auto-resume=1 " in script


def test_tags_are_in_the_comment_behind_the_run() -> None:
    script = render_script(slurm_request("run.tags={team: nlp, project: search}"))
    assert "#SBATCH --comment='shardyard-run=tiny project=search team=nlp'" in script
    assert "#SBATCH --comment=shardyard-run=tiny\n" in render_script(slurm_request())


@pytest.mark.parametrize(
    ("partition", "added"),
    [((), ["exclude", "reservation", "nice"]), (("launch.slurm.side_partition=cpu",), [])],
)
def test_a_side_job_gets_those_options_that_ask_for_no_devices(
    partition: tuple[str, ...], added: list[str]
) -> None:
    request = replace(slurm_request(OPTIONS, *partition), side=SIDE)
    script = render_script(request)
    names = ["exclude", "nodelist", "reservation", "gres", "switches", "contiguous", "nice"]
    assert [name for name in names if name in _directives(script)] == added
    assert "auto-resume" not in script


def test_gpus_are_not_asked_for_where_the_cluster_s_slurm_manages_none() -> None:
    asked = _directives(
        render_script(
            slurm_request("cluster.instance=p5.48xlarge", "launch.slurm.request_gpus=false")
        )
    )
    assert "gpus-per-node" not in asked and "exclusive" in asked


def test_gpus_of_a_gres_take_the_place_of_our_own_option_and_must_be_as_many() -> None:
    gres = "launch.slurm.options={gres: 'gpu:h100:8'}"
    asked = _directives(render_script(slurm_request("cluster.instance=p5.48xlarge", gres)))
    assert asked["gres"] == "gpu:h100:8" and "gpus-per-node" not in asked
    with pytest.raises(RequestError, match=r"gres=gpu:4 asks for 4 GPUs of each node, where 8"):
        render_script(
            slurm_request("cluster.instance=p5.48xlarge", "launch.slurm.options={gres: 'gpu:4'}")
        )


@pytest.mark.parametrize(("limit", "minutes"), [("2h", "59"), ("30min", "30"), (None, "59")])
def test_a_block_s_end_is_the_job_s_time_limit_if_that_is_sooner(
    limit: str | None, minutes: str
) -> None:
    block = ("cluster.capacity=block:cr-0123456789abcdef0", "cluster.instance=p5.48xlarge",
             "cluster.block_ends=2027-01-31T11:30:00Z")  # fmt: skip
    given = () if limit is None else (f"launch.time_limit={limit}",)
    request = replace(slurm_request(*block, *given), block_left_s=3599.0)
    assert _directives(render_script(request))["time"] == minutes
    with pytest.raises(RequestError, match=r"what is left of cluster\.capacity=block:cr-"):
        render_script(replace(request, block_left_s=100.0))


def test_there_is_no_golden_script_that_nothing_renders() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", instance_names())
def test_every_machine_of_the_catalogue_is_asked_for_with_its_devices(name: str) -> None:
    asked = _directives(render_script(slurm_request(f"cluster.instance={name}")))
    machine = instance(name)
    is_gpu = machine.accelerator.device not in ("hpu", "xla")
    assert asked.get("gpus-per-node") == (str(machine.count) if is_gpu else None)
    assert "exclusive" in asked


def test_accelerators_come_as_whole_nodes_with_the_number_of_the_catalogue() -> None:
    script = render_script(slurm_request("cluster.instance=p5.48xlarge", nodes=4))
    asked = _directives(script)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("4", "1", "8")
    assert "exclusive" in asked
    assert asked["mem"] == "0"


def test_accelerators_that_slurm_does_not_call_gpu_come_with_the_whole_node() -> None:
    asked = _directives(render_script(slurm_request("cluster.instance=dl1.24xlarge")))
    assert "gpus-per-node" not in asked
    assert "exclusive" in asked


def test_machines_that_nobody_listed_still_have_their_gpus_asked_for() -> None:
    asked = _directives(render_script(slurm_request("cluster.device=cuda", devices=4)))
    assert asked["gpus-per-node"] == "4"


def test_a_cpu_node_gives_a_core_to_each_process_and_is_shared() -> None:
    asked = _directives(render_script(slurm_request(devices=2)))
    assert asked["cpus-per-task"] == "2"
    assert not {"gpus-per-node", "exclusive", "mem"} & set(asked)


def test_what_the_cluster_asks_is_passed_on() -> None:
    request = slurm_request(
        "launch.time_limit=90min",
        "launch.slurm.partition=h200",
        "launch.slurm.account=team-a",
        "launch.slurm.qos=high",
        "launch.slurm.constraint='a|b'",
        "launch.slurm.signal_before_s=300",
    )
    asked = _directives(render_script(request))
    assert asked["time"] == "90"
    assert asked["signal"] == "B:USR1@300"
    assert (asked["partition"], asked["account"], asked["qos"]) == ("h200", "team-a", "high")
    assert asked["constraint"] == "'a|b'"
    assert asked["output"] == "/shared/runs/tiny/logs/slurm-%j.log"


def test_without_a_wish_nothing_is_asked_for() -> None:
    asked = _directives(render_script(slurm_request()))
    assert not {"time", "partition", "account", "qos", "constraint"} & set(asked)
    assert asked["export"] == "NONE"


@pytest.mark.parametrize(("limit", "minutes"), [("61.5min", "62"), ("1.01h", "61")])
def test_a_time_limit_is_rounded_up_to_slurms_minutes(limit: str, minutes: str) -> None:
    asked = _directives(render_script(slurm_request(f"launch.time_limit={limit}")))
    assert asked["time"] == minutes


def test_an_image_that_no_node_runs_is_warned_of() -> None:
    """On Slurm, Pyxis takes its own setting; without it the nodes run their own Python."""
    (told,) = SlurmLauncher().render(slurm_request("launch.image=r/shardyard:1")).warnings
    assert told.startswith("launch.image=r/shardyard:1 is not used on Slurm")
    assert "set launch.slurm.container_image" in told
    with_pyxis = slurm_request("launch.image=r/a:1", "launch.slurm.container_image=r#a:1")
    assert not SlurmLauncher().render(with_pyxis).warnings


@pytest.mark.heavy
def test_a_run_that_may_not_be_requeued_is_not() -> None:
    script = render_script(slurm_request("launch.slurm.requeue=false"))
    assert "no-requeue" in _directives(script)
    assert _printed(script, "echo $requeue") == "no\n"


def _in_task(script: str) -> dict[str, str]:
    """The environment that srun is started with."""
    printed = _printed_bytes(script, '"${environment[@]}" env -0').decode()
    return dict(line.split("=", 1) for line in printed.split("\0") if line)


@pytest.mark.heavy
def test_a_value_arrives_as_it_was_whatever_it_holds() -> None:
    control = "".join(map(chr, [*range(1, 0x250), 0x2028, 0x202E, 0xFEFF, 0x1F600]))
    env = {"TEXT": NASTY, "CONTROL": control, "LINES": "a\r\nb\n", "QUOTE": "\\'\x01'"}
    script = render_script(slurm_request(f"launch.env={json.dumps(env)}"))
    assert env.items() <= _in_task(script).items()
    assert all(line.isprintable() for line in script.splitlines())
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.heavy
def test_a_variable_may_be_called_as_one_of_bash_or_of_the_script() -> None:
    listed = subprocess.run(
        ["bash", "-c", "compgen -v"], env={}, capture_output=True, text=True, check=True
    )
    script = render_script(slurm_request())
    own = re.findall(r"^\s*(?:local )?([a-z_]+)=", script, re.MULTILINE)
    assert {"run_dir", "step", "srun"} <= set(own) and "UID" in listed.stdout.split()
    env = {name: f"value of {name}" for name in (*listed.stdout.split(), *own) if name != "PATH"}
    script = render_script(slurm_request(f"launch.env={json.dumps(env)}"))
    assert env.items() <= _in_task(script).items()
    assert _printed(script, 'echo "$run_dir"') == "/shared/runs/tiny\n"


@pytest.mark.heavy
def test_a_name_that_is_no_variables_runs_nothing_even_if_nobody_checked_it(tmp_path: Path) -> None:
    name = f"A=1; touch {tmp_path}/x; B"
    script = render_script(slurm_request(f"launch.env={json.dumps({name: 'v'})}"))
    _printed(script, "true")
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_a_folder_with_a_quote_and_a_percent_is_one_word_for_bash() -> None:
    script = render_script(slurm_request(run_dir="/shared/it's 100 %j/run"))
    words = _printed(script, 'printf "%s\\n" "${node[@]}"').splitlines()
    assert words == [
        sys.executable, "-P", "-m", "shardyard.node", "/shared/it's 100 %j/run/launch/recipe.yaml",
        "--run-dir", "/shared/it's 100 %j/run", "--place", "slurm",
    ]  # fmt: skip
    assert "%%j/run/logs/slurm-%j-node-%t.log" in _printed(script, 'echo "${srun[@]}"')


@pytest.mark.heavy
def test_the_whole_script_is_bash() -> None:
    script = render_script(slurm_request(run_dir="/shared/it's here/run"))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_secret_is_passed_by_the_name_of_its_variable_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("value-in-a-file")
    request = slurm_request(
        f"secrets={{HF_TOKEN: env, WANDB_API_KEY: 'env:MY_KEY', OTHER: 'file:{file}'}}"
    )
    script = render_script(request)
    assert _directives(script)["export"] == "HF_TOKEN,MY_KEY"
    assert exported_names(request.recipe) == ("HF_TOKEN", "MY_KEY")
    assert "value-in-a-file" not in script


def test_a_secret_that_slurm_keeps_in_clear_is_told_of() -> None:
    request = slurm_request("secrets={B: env, A: 'env:MY_A', OTHER: 'file:/run/key'}")
    (told,) = SlurmLauncher().render(request).warnings
    assert told.startswith("secrets.A, secrets.B: kept in env, so sbatch hands the value")
    assert "StateSaveLocation" in told and "secrets: {NAME: file:/path}" in told
    assert not SlurmLauncher().render(slurm_request("secrets={A: 'file:/run/key'}")).warnings


@pytest.mark.heavy
def test_a_container_has_the_run_folder_in_it_and_its_own_python() -> None:
    request = slurm_request(
        "launch.slurm.container_image=/shared/shardyard.sqsh",
        "launch.slurm.container_mounts=['/data:/data']",
    )
    script = render_script(request)
    srun = _printed(script, 'printf "%s\\n" "${srun[@]}"').splitlines()
    assert "--container-image=/shared/shardyard.sqsh" in srun
    assert "--container-mounts=/data:/data,/shared/runs/tiny:/shared/runs/tiny" in srun
    assert _printed(script, "echo ${node[0]}") == "python3\n"


@pytest.mark.heavy
def test_the_python_of_the_nodes_can_be_named() -> None:
    script = render_script(slurm_request("launch.slurm.python=/opt/py/bin/python"))
    assert _printed(script, "echo ${node[0]}") == "/opt/py/bin/python\n"


@pytest.mark.heavy
def test_nodes_that_still_save_are_not_killed_because_the_first_has_drained() -> None:
    srun = _printed(
        render_script(
            slurm_request("elastic.drain_timeout_s=200", "launch.slurm.signal_before_s=200")
        ),
        'echo "${srun[@]}"',
    )
    assert "--kill-on-bad-exit=0 --wait=200" in srun


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('launch.slurm.partition="a\\nb"', r"launch.slurm.partition='a\\nb' cannot be in"),
        ("launch.slurm.account='a\\b'", "launch.slurm.account=.* Choose another"),
        ("elastic.drain_timeout_s=121", "is above launch.slurm.signal_before_s=120"),
        ("launch.time_limit=3min", "is not longer than the 180 s.* Raise the one or lower"),
    ],
)
def test_what_cannot_stand_in_a_script_is_refused(override: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        render_script(slurm_request(override))


def test_a_relative_run_folder_is_refused() -> None:
    with pytest.raises(RequestError, match=r"not an absolute path.* Write the whole path"):
        render_script(slurm_request(run_dir="runs/tiny"))


@pytest.mark.parametrize("name", ["50%-60%", "%5t", "%%"])
def test_a_folder_whose_name_slurm_would_read_as_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"run\.dir: .*holds several % or one before a digit"):
        render_script(slurm_request(run_dir=f"/shared/{name}/run"))


@pytest.mark.parametrize("name", ["a:b", "a,b"])
def test_a_folder_that_cannot_be_mounted_is_refused_with_a_container(name: str) -> None:
    render_script(slurm_request(run_dir=f"/shared/{name}/run"))
    with pytest.raises(RequestError, match=r"run\.dir: .*holds a colon or a comma"):
        render_script(
            slurm_request("launch.slurm.container_image=i", run_dir=f"/shared/{name}/run")
        )
