"""`launch.slurm.options`: what may be added to sbatch and srun, in which form; nothing else."""

from typing import Any

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.config.rules.slurm_options import ALLOWED, RESERVED, gpus_in, words_of
from shardyard.errors import RecipeError


def refusal(slurm: dict[str, Any]) -> str:
    recipe = {"model": {"preset": "llama-tiny"}, "launch": {"slurm": slurm}}
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([recipe]))
    return str(refused.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_the_example_of_each_option_is_taken(name: str) -> None:
    option = ALLOWED[name]
    value = option.example if option.form else True
    recipe = {"model": {"preset": "llama-tiny"}, "launch": {"slurm": {"options": {name: value}}}}
    check(load_recipe([recipe]))
    assert words_of({name: value}, option.client, is_side=False) == [
        (name, option.example if option.form else None)
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exclude", "node 3"),
        ("exclude", "-w n1"),
        ("nodelist", "node[1-2"),
        ("reservation", "a b"),
        ("gres", "gpu:8;rm"),
        ("gres", "8"),
        ("switches", "one"),
        ("switches", True),
        ("contiguous", "yes"),
        ("auto-resume", 2),
        ("mail-type", "ALWAYS"),
        ("begin", 960),  # what YAML 1.1 makes of 16:00
        ("dependency", "afterok"),
        ("licenses", ""),
    ],
)
def test_a_value_of_another_form_is_refused_with_an_example(name: str, value: object) -> None:
    text = refusal({"options": {name: value}})
    assert f"launch.slurm.options.{name}=" in text and f"is not a value of --{name}" in text
    wanted = f"such as {ALLOWED[name].example}" if ALLOWED[name].form else "true or false"
    assert wanted in text


@pytest.mark.parametrize("name", RESERVED)
def test_an_option_that_the_launch_sets_itself_is_refused_with_the_setting_s_name(
    name: str,
) -> None:
    assert name not in ALLOWED
    text = refusal({"options": {name: "1"}})
    fix = RESERVED[name].removesuffix(".")
    fix = fix if fix.startswith("Leave it out") else f"Set {fix}"
    assert f"launch.slurm.options: '{name}' is set by the launch itself. {fix}." in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "excludes",
            (
                "is not an option that Shardyard passes on. Did you mean exclude? Allowed are "
                "exclude, "
            ),
        ),
        ("walltime", "is not an option that Shardyard passes on. Did you mean launch.time_limit? "),
        ("wrap", "is not an option that Shardyard passes on."),
        ("--exclude", "is written without dashes. Write exclude."),
        ("uid", "is not an option that Shardyard passes on."),
    ],
)
def test_an_option_that_is_not_known_is_refused_with_the_nearest_and_all(
    name: str, words: str
) -> None:
    assert words in refusal({"options": {name: "1"}})


def test_a_flag_that_is_false_is_not_passed_on() -> None:
    assert words_of({"contiguous": False}, "sbatch", is_side=False) == []


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu", 1),
        ("gpu:a100", 1),
        ("gpu:a100:4,nvme:1,gpu:t4:2", 6),
        ("nvme:1", None),
        ("", None),
    ],
)
def test_the_gpus_that_a_gres_names_are_counted(gres: str, gpus: int | None) -> None:
    assert gpus_in(gres) == gpus


def test_gpus_of_a_gres_contradict_a_cluster_that_manages_none() -> None:
    text = refusal({"options": {"gres": "gpu:8"}, "request_gpus": False})
    assert "launch.slurm.options.gres=gpu:8 asks for GPUs, and launch.slurm.request_gpus" in text


@pytest.mark.parametrize(
    "mount",
    ["/a:b", "/a,b:/c", "/data:1:/data", "a:/a", "/a:/b:RO", "/a:/b:ro:rw", "/a:/b:ro,/c:/d", ""],
)
def test_a_mount_that_pyxis_would_split_elsewhere_is_refused(mount: str) -> None:
    text = refusal({"container_image": "a", "container_mounts": [mount]})
    assert f"launch.slurm.container_mounts={mount} is not /source:/target" in text
    assert "leave a symbolic link without them" in text


@pytest.mark.parametrize("mount", ["/a", "/a:/b", "/a b:/it's", "/a:/b:ro", "/a:/b:ro+rprivate"])
def test_a_mount_that_pyxis_can_write_is_taken(mount: str) -> None:
    slurm = {"container_image": "a", "container_mounts": [mount]}
    check(load_recipe([{"model": {"preset": "llama-tiny"}, "launch": {"slurm": slurm}}]))
