"""Credentials are known by their form, under any name; commits, digests and paths are none."""

import random
import string
import uuid

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.config.secrets import HIDDEN, find_credential, redact
from shardyard.errors import RecipeError

_DICE = random.Random(0)


def some(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(_DICE.choice(letters) for _ in range(length))


URL_SAFE = string.ascii_letters + string.digits + "-_"
BASE64 = string.ascii_letters + string.digits + "+/"
HEX = "0123456789abcdef"

# Forms as their issuers document them.
CREDENTIALS = [
    ("a W&B key", f"wandb_v1_{some(70)}"),
    ("a W&B key", f"local-{some(40, HEX)}"),
    ("an NVIDIA API key", f"nvapi-{some(64, URL_SAFE)}"),
    ("a GitLab token", f"glpat-{some(20, URL_SAFE)}"),
    ("a GitLab token", f"gldt-{some(20, URL_SAFE)}"),
    ("a Google API key", f"AIza{some(35, URL_SAFE)}"),
    ("a Google API key", f"ya29.{some(60, URL_SAFE)}"),
    ("a signed token (JWT)", f"eyJhbGciOiJIUzI1NiJ9.eyJ{some(40, URL_SAFE)}.{some(43, URL_SAFE)}"),
    ("an AWS secret key", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),  # of AWS's documents
    ("an AWS access key", f"ASIA{some(16, string.ascii_uppercase)}"),
    ("an Azure key", f"{some(86, BASE64)}=="),
    ("an Azure key", f"https://a.blob.core.windows.net/c?sp=r&sig={some(43)}%3D"),
    ("a Hugging Face token", f"hf_{some(34)}"),
    ("a Hugging Face token", f"api_org_{some(34)}"),
    ("a GitHub token", f"github_pat_{some(22)}_{some(59)}"),
    ("an API key", f"sk-proj-{some(48)}"),
    ("an API key", f"sk-svcacct-{some(74, URL_SAFE)}T3BlbkFJ{some(74, URL_SAFE)}"),
    ("an API key", f"sk-admin-{some(58, URL_SAFE)}T3BlbkFJ{some(58, URL_SAFE)}"),
    ("an API key", f"sk-{some(20)}T3BlbkFJ{some(20)}"),
    ("an API key", f"sk-ant-api03-{some(93, URL_SAFE)}AA"),
    ("an API key", f"sk-ant-admin01-{some(93, URL_SAFE)}AA"),
    ("an API key", f"sk-or-v1-{some(64, HEX)}"),
    ("an API key", f"sk-{some(32, HEX)}"),
    ("a PyPI or npm token", f"npm_{some(36)}"),
    ("a Slack token", f"https://hooks.slack.com/services/T{some(8)}/B{some(8)}/{some(24)}"),
]

INNOCENT = [
    some(40, HEX),  # a commit; of a key see below
    f"registry.example/train@sha256:{some(64, HEX)}",
    some(64, HEX),
    str(uuid.UUID(int=_DICE.getrandbits(128))),
    "arn:aws:secretsmanager:us-east-1:123456789012:secret:hugging-face-AbCdEf",
    "/Data/team/Project/checkpoints/run12345a",  # 40 characters
    "datasets/HuggingFaceFW/fineweb/sample/10",  # 40 characters
    "/fsx/shared/llama2-7b-finetune-2026/checkpoints/step-00000100/model.safetensors",
    "meta-llama/Llama-3.1-405B-Instruct",
    "https://user@host/data",
    "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
    "eyJ is how a token begins",
    "HABANA_VISIBLE_DEVICES=all NCCL_SOCKET_IFNAME=^lo,docker0",
    "$(nvapi)",
    "glpat",
    "sk-learn-contrib-imbalanced-learn-2026",
    "registry.example/ml/sk-proj-learning-to-rank-baseline",
    "sk-antarctica-survey-segmentation-v2",
    "/data/sk-SK-czech-slovak-parallel-corpus",
    "task-0123456789abcdef01234567",  # the letters stand inside of a word
]


@pytest.mark.parametrize(("kind", "text"), CREDENTIALS)
@pytest.mark.parametrize("around", ["{}", "--key={}", 'X: "{}"', "say {} please"])
def test_a_documented_form_is_known_whatever_stands_around_it(
    kind: str, text: str, around: str
) -> None:
    if "=" in around and kind == "an Azure key" and text.endswith("=="):
        pytest.skip("base64 has the same sign")
    assert find_credential(around.format(text)) == kind
    assert redact(around.format(text)) == HIDDEN


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_like_one_passes(text: str) -> None:
    assert find_credential(text) is None


def test_of_a_thousand_random_secret_keys_of_aws_hardly_one_is_missed() -> None:
    dice = random.Random(1)
    keys = ["".join(dice.choice(BASE64) for _ in range(40)) for _ in range(1000)]
    assert sum(find_credential(key) == "an AWS secret key" for key in keys) >= 990


@pytest.mark.parametrize(("kind", "text"), CREDENTIALS)
def test_it_is_refused_under_an_innocent_name_and_not_repeated(kind: str, text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([], ["model.preset=llama-tiny", f"launch.env={{COLOUR: '{text}'}}"]))
    assert f"launch.env.COLOUR: holds {kind} (not shown)" in str(refused.value)
    assert text not in str(refused.value)


@pytest.mark.parametrize("name", ["COLOUR", "WANDB", "SHAPE"])
def test_forty_hexadecimal_digits_may_be_a_key_of_weights_and_biases(name: str) -> None:
    text = some(40, HEX)
    with pytest.raises(RecipeError) as refused:
        check(load_recipe([], ["model.preset=llama-tiny", f"launch.env={{{name}: '{text}'}}"]))
    assert f"launch.env.{name}: holds 40 hexadecimal digits" in str(refused.value)
    assert f"such as {name}_COMMIT" in str(refused.value)
    assert text not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["GIT_COMMIT", "REVISION", "MODEL_SHA", "COLOUR_COMMIT", "git_ref"]
)
def test_forty_hexadecimal_digits_are_a_commit_where_the_name_says_so(name: str) -> None:
    check(load_recipe([], ["model.preset=llama-tiny", f"launch.env={{{name}: '{some(40, HEX)}'}}"]))
