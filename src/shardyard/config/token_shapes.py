"""Shapes of tokens and keys, by the marks that their issuers gave them for scanners.

One row is a kind, the mark that every such token has, and what follows the mark. Patterns
only ask for as many characters as separate a token from a word, and bound every repetition.
So the time of a search grows with the text's length.

To add one: the issuer's documentation, a row, and an example in
tests/config/test_token_shapes.py.
"""

import re

_W = r"[\w-]"
_AN = "[A-Za-z0-9]"
_HEX = "[0-9a-f]"

_ROWS: tuple[tuple[str, str, str], ...] = (
    # machine learning
    ("a Hugging Face token", "hf_", f"{_AN}{{10}}"),
    ("a Hugging Face token", "api_org_", f"{_AN}{{20}}"),
    ("an NVIDIA API key", "nvapi-", f"{_W}{{20}}"),
    ("a W&B key", "wandb_v1_", r"\w{16}"),
    ("a W&B key", "local-", rf"(?:{_W}{{0,64}}-)?{_HEX}{{40}}\b"),
    ("an API key", "sk-proj-", rf"(?={_W}{{0,200}}[0-9])(?={_W}{{0,200}}[A-Z]){_W}{{20}}"),
    ("an API key", "sk-svcacct-", rf"(?={_W}{{0,200}}[0-9])(?={_W}{{0,200}}[A-Z]){_W}{{20}}"),
    ("an API key", "sk-admin-", rf"(?={_W}{{0,200}}[0-9])(?={_W}{{0,200}}[A-Z]){_W}{{20}}"),
    ("an API key", "sk-None-", rf"(?={_W}{{0,200}}[0-9])(?={_W}{{0,200}}[A-Z]){_W}{{20}}"),
    ("an API key", "sk-ant-", f"[a-z]{{1,20}}[0-9]{{2}}-{_W}{{20}}"),  # Anthropic
    ("an API key", "sk-or-v1-", f"{_HEX}{{32}}"),  # OpenRouter
    ("an API key", "sk-lf-", f"{_HEX}{{8}}-{_HEX}{{4}}-"),  # Langfuse
    ("an API key", "sk-", f"(?=[A-Za-z]{{0,200}}[0-9]){_AN}{{20}}"),  # OpenAI's older, DeepSeek
    ("an API key", "gsk_", f"{_AN}{{40}}"),  # Groq
    ("an API key", "xai-", f"{_AN}{{60}}"),
    ("an API key", "pplx-", f"{_AN}{{40}}"),  # Perplexity
    ("an API key", "r8_", f"{_AN}{{37}}"),  # Replicate
    ("an API key", "tgp_v1_", f"{_W}{{40}}"),  # Together
    ("an API key", "csk-", "[a-z0-9]{48}"),  # Cerebras
    ("an API key", "jina_", f"{_HEX}{{32}}"),
    ("an API key", "pcsk_", r"\w{40}"),  # Pinecone
    ("an API key", "lsv2_", f"(?:pt|sk)_{_HEX}{{32}}"),  # LangSmith
    ("an API key", "rpa_", "[A-Z0-9]{36}"),  # RunPod
    ("a Neptune token", "eyJhcGlfYWRkcmVzcyI6", "[A-Za-z0-9+/=]{20}"),
    ("a Databricks token", "dapi", rf"{_HEX}{{32}}(?:-\d)?\b"),
    ("a Databricks token", "dose", rf"{_HEX}{{32}}\b"),
    # clouds
    ("an AWS access key", "AKIA", "[A-Z0-9]{12}"),
    ("an AWS access key", "ASIA", "[A-Z0-9]{12}"),
    ("an AWS access key", "ABIA", "[A-Z0-9]{16}"),
    ("an AWS access key", "ACCA", "[A-Z0-9]{16}"),
    ("an AWS session token", "IQoJb3JpZ2lu", "[A-Za-z0-9+/=]{40}"),
    ("an AWS session token", "FwoGZXIvYXdz", "[A-Za-z0-9+/=]{40}"),
    ("an AWS Bedrock key", "ABSK", "[A-Za-z0-9+/]{100}"),
    ("a Google API key", "AIza", f"{_W}{{35}}"),
    ("a Google API key", "GOCSPX-", f"{_W}{{20}}"),
    ("a Google API key", "ya29.", f"{_W}{{20}}"),
    ("an Alibaba Cloud key", "LTAI", rf"{_AN}{{20}}\b"),
    ("a Tencent Cloud key", "AKID", rf"{_AN}{{32}}\b"),
    ("a DigitalOcean token", "dop_v1_", f"{_HEX}{{64}}"),
    ("a DigitalOcean token", "doo_v1_", f"{_HEX}{{64}}"),
    ("a DigitalOcean token", "dor_v1_", f"{_HEX}{{64}}"),
    ("a Cloudflare key", "v1.0-", f"{_HEX}{{24}}-{_HEX}{{100}}"),
    ("a Scaleway key", "SCW", r"[A-Z0-9]{17}\b"),
    ("a Heroku key", "HRKU-", f"{_W}{{30}}"),
    ("a Fly token", "fo1_", f"{_W}{{40}}"),
    ("a Fly token", "fm2_", "[A-Za-z0-9+/=]{40}"),
    ("a Netlify token", "nfp_", f"{_AN}{{36}}"),
    ("a Supabase key", "sbp_", f"{_HEX}{{40}}"),
    ("a Supabase key", "sb_secret_", f"{_W}{{20}}"),
    ("a PlanetScale key", "pscale_", r"(?:tkn|oauth|pw)_[\w=.-]{32}"),
    ("a Tailscale key", "tskey-", f"[a-z]{{2,12}}-{_W}{{16}}"),
    ("a Pulumi token", "pul-", f"{_HEX}{{40}}"),
    ("a Terraform token", ".atlasv1.", f"{_W}{{60}}"),
    ("a Vault token", "hvs.", f"{_W}{{24}}"),
    ("a Vault token", "hvb.", f"{_W}{{24}}"),
    ("a 1Password key", "ops_eyJ", "[A-Za-z0-9+/]{100}"),
    ("an age key", "AGE-SECRET-KEY-1", "[A-Z0-9]{58}"),
    (
        "a Doppler token",
        "dp.",
        rf"(?:ct|pt|st|sa|scim|audit)\.(?:[a-z0-9_-]{{1,40}}\.)?{_AN}{{40}}",
    ),
    # source code, builds, packages, images
    *(("a GitHub token", f"gh{letter}_", f"{_AN}{{10}}") for letter in "pousr"),
    ("a GitHub token", "github_pat_", r"\w{10}"),
    *(
        ("a GitLab token", f"gl{kind}-", r"[\w.=-]{16}")
        for kind in (
            "pat", "oas", "dt", "rt", "rtr", "cbt", "ptt", "ft", "imt", "agent", "soat", "ffct",
        )
    ),
    ("an Atlassian token", "ATATT3", r"[\w=-]{50}"),
    ("an Atlassian token", "ATCTT3", r"[\w=-]{50}"),
    ("a Bitbucket token", "ATBB", rf"{_AN}{{32}}\b"),
    ("a CircleCI token", "CCIPAT_", r"\w{40}"),
    ("a Buildkite token", "bkua_", f"{_HEX}{{40}}"),
    *(("a SonarQube token", f"sq{letter}_", f"{_HEX}{{40}}") for letter in "upa"),
    ("a Docker token", "dckr_pat_", f"{_W}{{20}}"),
    ("a Docker token", "dckr_oat_", f"{_W}{{20}}"),
    ("a PyPI or npm token", "pypi-", f"{_W}{{40}}"),
    ("a PyPI or npm token", "npm_", f"{_AN}{{30}}"),
    ("a RubyGems key", "rubygems_", f"{_HEX}{{48}}"),
    ("a crates.io token", "cio", rf"{_AN}{{32}}\b"),
    ("a NuGet key", "oy2", r"[a-z0-9]{43}\b"),
    ("a Clojars token", "CLOJARS_", "[a-z0-9]{60}"),
    ("an Artifactory key", "AKCp", f"{_AN}{{60}}"),
    ("an Artifactory key", "cmVmd", f"{_AN}{{59}}"),
    # messages, monitoring, services
    *(("a Slack token", f"xox{letter}-", "[A-Za-z0-9-]{10}") for letter in "abceprs"),
    ("a Slack token", "xoxe.", "xox[bp]-"),
    ("a Slack token", "xapp-", "[0-9]-[A-Z0-9]{5}"),
    (
        "a Slack token",
        "hooks.slack.com/",
        r"(?:services|workflows|triggers)/\w{1,40}/\w{1,40}/\w{6}",
    ),
    ("a Grafana token", "glsa_", f"{_AN}{{32}}"),
    ("a Grafana token", "glc_", "[A-Za-z0-9+/=]{32}"),
    ("a Sentry token", "sntrys_", "[A-Za-z0-9+/=_-]{30}"),
    ("a Sentry token", "sntryu_", f"{_HEX}{{64}}"),
    ("a New Relic key", "NRAK-", "[A-Z0-9]{27}"),
    ("a Dynatrace token", "dt0c01.", "[A-Z0-9]{24}"),
    ("a PostHog key", "phx_", f"{_AN}{{40}}"),
    ("a Stripe key", "whsec_", "[A-Za-z0-9+/]{30}"),
    ("a SendGrid key", "SG.", rf"{_W}{{16,32}}\.{_W}{{16}}"),
    ("a Mailgun key", "key-", rf"{_HEX}{{32}}\b"),
    ("a Brevo key", "xkeysib-", f"{_HEX}{{64}}"),
    ("a Twilio key", "SK", rf"{_HEX}{{32}}\b"),
    ("a Notion token", "ntn_", f"{_AN}{{40}}"),
    ("a Notion token", "secret_", rf"{_AN}{{43}}\b"),
    ("a Linear key", "lin_api_", f"{_AN}{{40}}"),
    ("a Figma token", "figd_", f"{_W}{{40}}"),
    ("an Airtable token", "pat", rf"{_AN}{{14}}\.{_HEX}{{64}}"),
    *(("a Shopify token", f"shp{kind}_", f"{_HEX}{{32}}") for kind in ("at", "ca", "pa", "ss")),
    *(
        ("a Stripe key", f"{kind}_{of}_", f"{_AN}{{10}}")
        for kind in ("sk", "rk")
        for of in ("live", "test", "prod")
    ),
    ("a Square token", "EAAA", rf"{_W}{{56}}"),
    ("a Square token", "sq0atp-", f"{_W}{{22}}"),
    ("a Sourcegraph token", "sgp_", f"(?:(?:{_HEX}{{16}}|local)_)?{_HEX}{{40}}"),
    ("a Typeform token", "tfp_", r"[\w.=-]{59}"),
    ("a Yandex key", "AQVN", f"{_W}{{35}}"),
    ("an Octopus key", "API-", r"[A-Z0-9]{26}\b"),
    ("an Adobe secret", "p8e-", f"{_AN}{{32}}"),
    ("a Duffel token", "duffel_", f"(?:test|live)_{_W}{{43}}"),
    ("an EasyPost key", "EZAK", rf"{_AN}{{54}}"),
    ("a Shippo token", "shippo_", f"(?:live|test)_{_HEX}{{40}}"),
    ("a Frame.io token", "fio-u-", f"{_W}{{60}}"),
    ("a Postman key", "PMAK-", f"{_HEX}{{24}}"),
)  # fmt: skip

_WEBHOOKS = (
    ("discord", r"discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/\d{5,25}/[\w-]{16}"),
    ("webhook.office.com/", r"webhook\.office\.com/webhookb2/[\w@-]{20}"),
    ("outlook.office.com/webhook/", r"outlook\.office\.com/webhook/[\w@-]{20}"),
    ("hooks.zapier.com/", r"hooks\.zapier\.com/hooks/catch/\d{2,12}/\w{5}"),
    ("/hooks/", r"/hooks/(?:[a-z0-9]{26}\b|[A-Za-z0-9]{15,30}/[A-Za-z0-9]{30})"),
    ("maker.ifttt.com/", r"/trigger/[\w-]{1,80}/(?:json/)?with/key/[\w-]{10}"),
    ("/hook/", r"/open-apis/bot/(?:v2/)?hook/[\w-]{20}"),
    ("webhooks/incoming/", r"webhooks/incoming/[\w-]{20}"),
    ("pagerduty.com/", r"pagerduty\.com/(?:integration|x-ere)/\w{20}"),
    ("chat.googleapis.com/", r"chat\.googleapis\.com/v1/spaces/[^\s?]{1,200}\?\S{0,20}key="),
)
"""Addresses at which anybody who knows them can post."""

_UNMARKED: tuple[tuple[str, str, str], ...] = (
    ("a signed token (JWT)", "eyJ", rf"(?<!{_W})eyJ{_W}{{10,}}\.{_W}{{10,}}\.{_W}{{10}}"),
    ("an Azure key", "==", r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}=="),
    ("an Azure key", "Q~", r"[\w~.]{3}\dQ~[\w~.-]{31}"),
    ("an Azure key", "sig=", r"[?&]sig=[A-Za-z0-9%+/=]{30}"),
    ("a private key", "PRIVATE KEY", r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"),
    ("a Telegram token", ":AA", rf"\b\d{{8,10}}:AA{_W}{{33}}"),
    *(("a webhook's address", mark, rest) for mark, rest in _WEBHOOKS),
)  # fmt: skip

SHAPES: tuple[tuple[str, str, str], ...] = (
    *(
        (kind, mark, (r"\b" if mark[0] != "." else "") + re.escape(mark) + rest)
        for kind, mark, rest in _ROWS
    ),
    *_UNMARKED,
)
"""Kind, a mark that must be found before a search, pattern. A pattern is compiled when its
mark is found, as each command's start would wait for all of them.
"""


def find_token(text: str) -> str | None:
    """Kind of the first token or key in a text whose shape its issuer published, or None."""
    return next(
        (kind for kind, mark, shape in SHAPES if mark in text and re.search(shape, text, re.ASCII)),
        None,
    )
