"""Tokens by the shapes that their issuers published, names of secrets, and what is neither."""

import random
import string
import time

import pytest

from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.secrets import find_credential
from shardyard.config.token_shapes import SHAPES, find_token

_DICE = random.Random(0)
HEX = "0123456789abcdef"
WORD = string.ascii_letters + string.digits
UPPER = string.ascii_uppercase + string.digits


def some(length: int, letters: str = WORD) -> str:
    return "".join(_DICE.choice(letters) for _ in range(length))


# Forms as their issuers document them.
TOKENS = {
    "dapi" + some(32, HEX): "a Databricks token",
    "gsk_" + some(52): "an API key",
    "r8_" + some(37): "an API key",
    "pcsk_" + some(60): "an API key",
    f"lsv2_pt_{some(32, HEX)}_{some(10, HEX)}": "an API key",
    "rpa_" + some(40, UPPER): "an API key",
    "dop_v1_" + some(64, HEX): "a DigitalOcean token",
    "LTAI" + some(20): "an Alibaba Cloud key",
    f"tskey-auth-{some(12)}CNTRL-{some(32)}": "a Tailscale key",
    "pul-" + some(40, HEX): "a Pulumi token",
    f"{some(14)}.atlasv1.{some(67)}": "a Terraform token",
    "hvs." + some(95): "a Vault token",
    "dp.pt." + some(43): "a Doppler token",
    "dckr_pat_" + some(27): "a Docker token",
    "AKCp8" + some(68): "an Artifactory key",
    f"glsa_{some(32)}_{some(8, HEX)}": "a Grafana token",
    "sntryu_" + some(64, HEX): "a Sentry token",
    "NRAK-" + some(27, UPPER): "a New Relic key",
    f"SG.{some(22)}.{some(43)}": "a SendGrid key",
    f"xapp-1-A{some(10, UPPER)}-{some(13, string.digits)}-{some(64, HEX)}": "a Slack token",
    "sk_live_" + some(24): "a Stripe key",
    "ATATT3xFfGF0" + some(180): "an Atlassian token",
    f"{some(9, '123456789')}:AA{some(33)}": "a Telegram token",
    f"https://discord.com/api/webhooks/{some(18, '123')}/{some(68)}": "a webhook's address",
    f"https://discordapp.com/api/v10/webhooks/{some(18, '123')}/{some(68)}": "a webhook's address",
    f"https://x.webhook.office.com/webhookb2/{some(36, HEX)}@{some(9)}": "a webhook's address",
    f"https://chat.example.org/hooks/{some(26, string.ascii_lowercase)}": "a webhook's address",
    f"https://open.feishu.cn/open-apis/bot/v2/hook/{some(36, HEX)}": "a webhook's address",
    f"https://{some(20, HEX)}@git.example.org/x/y.git": "an address with a password",
    f"git+https://{some(40)}@example.org/x": "an address with a password",
    "redis://:correct-horse@cache:6379/0": "an address with a password",
    "postgresql://db/x?user=a&password=correct-horse": "an address with a password",
    f"https://logs.example.org/in?api_key={some(20)}": "an address with a password",
    f"https://b.s3.amazonaws.com/x?X-Amz-Signature={some(64, HEX)}": "an address with a password",
    "--db-password=correct-horse": "a password or key",
    "Server=tcp:x,1433;Database=d;Uid=u;Pwd=correct-horse;": "a password or key",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={some(30)}": "a password or key",
    f"Authorization: Basic {some(24)}": "a password or key",
    f"x-bearer: Bearer {some(30)}1": "a password or key",
}  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), TOKENS.items(), ids=lambda each: each[:24])
def test_a_published_form_is_a_credential(text: str, kind: str) -> None:
    assert find_credential(text) == kind
    assert find_credential(f"X={text} ") == kind


@pytest.mark.parametrize(
    "text",
    [
        "ssh://git@github.com/org/repo.git",
        "https://user@host/data",
        "s3://bucket/password=/part-0001.parquet",
        "--key-padding-mask --api-version=2024-10-21",
        "https://example.org/hooks/pre-commit",
        "https://huggingface.co/models?sort=downloads&search=llama",
        "hf_hub_download",
        "sk-learn-contrib-imbalanced-learn-2026",
        "secret_of_the_old_clock_and_other_stories_by_keene",
        "API-REFERENCE",
        "password=$DB_PASSWORD password=${X} api_key={{ vault }}",
        "eyJ" * 20,
    ],
)
def test_addresses_options_and_words_are_no_credentials(text: str) -> None:
    assert find_credential(text) is None


@pytest.mark.heavy
def test_every_search_takes_time_that_grows_with_the_text() -> None:
    marks = {mark for _, mark, _ in SHAPES}
    starts = [*marks, "eyJ-", "a://b:", "://", "?sig=", "password=", "bearer ", "A" * 39 + "+", "-"]
    for unit in starts:
        for text in (unit * (30_000 // len(unit)), unit + "a" * 30_000, unit + "a-" * 15_000):
            begun = time.process_time()
            find_credential(text)
            assert time.process_time() - begun < 1, unit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PGPASSWORD", "correct-horse"),
        ("MYSQL_PWD", "correct-horse"),
        ("APIKEY", "correct-horse"),
        ("authToken", "correct-horse"),
        ("MINIO_SECRETKEY", "correct-horse"),
        ("HF_TOKEN_PROD", "correct-horse"),
        ("TOKEN2", "correct-horse"),
        ("SMTP_PASS", "correct-horse"),
        ("ansible_become_passwd", "correct-horse"),
        ("SSH_KEY_PASSPHRASE", "correct-horse"),
        ("FERNET_KEY", "hC3p0r2d2Zx81kQ="),
        ("DD_CLIENT_AUTH", "9f86d081884c7d659a2feaa0c55ad015"),
        ("AZURE_STORAGE_CONNECTION_STRING", "correct-horse"),
    ],
)
def test_a_variable_is_called_a_secret_however_its_words_are_joined(name: str, value: str) -> None:
    assert is_called_a_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("MAX_TOKENS", "4096"),
        ("PAD_TOKEN", "<pad>"),
        ("PWD", "/work"),
        ("SSH_AUTH_SOCK", "/tmp/agent.1"),
        ("SORT_KEY", "created_at"),
        ("POSTGRES_PASSWORD_FILE", "/run/secrets/pg"),
        ("NCCL_DEBUG", "INFO"),
        ("COMPASS", "north"),
        ("MONKEY", "see"),
    ],
)
def test_other_variables_may_be_called_alike(name: str, value: str) -> None:
    assert not is_called_a_secret(name, value)


def test_a_source_file_that_compares_strings_holds_no_token() -> None:
    assert find_token("if password == get_password(): token = tokens[0]  # hf_hub") is None
