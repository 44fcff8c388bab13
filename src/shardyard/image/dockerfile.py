"""Container images that run shardyard: their versions, their Dockerfiles, what is copied into them.

Rendering is pure; docker/ holds what it renders, and a test compares them. Two kinds of base: one
that gets torch from its wheels (cpu, cuda-efa, cuda126-efa), and one that comes with torch built
for its device (gaudi, an AWS deep learning container).
"""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distributions, metadata
from pathlib import Path
from typing import Literal

import shardyard
from shardyard.config.versions import OLDEST_CODE, WHEEL_OF_OLDER, wheels_for_older
from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.io.files import write_text

Kind = Literal["cpu", "cuda-efa", "cuda126-efa", "gaudi", "dlc"]

USER_ID = 10001
"""No user of a base image has it, and it is not root."""


@dataclass(frozen=True, kw_only=True)
class ImageStack:
    """Versions that fit each other."""

    base_image: str
    torch: str
    wheel: str
    """Local part of the wheel's version, and the name of its index."""
    labels: dict[str, str]
    source: str


STACKS: dict[Kind, ImageStack] = {
    "cpu": ImageStack(
        base_image="docker.io/library/python:3.12.12-slim-bookworm",
        torch="2.13.0",
        wheel="cpu",
        labels={},
        source="constraints.txt",
    ),
    "cuda-efa": ImageStack(
        base_image="docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04",
        torch="2.13.0",
        wheel="cu130",
        # Driver: CUDA 13.0 release notes, minimum of the toolkit on Linux. NCCL: in the wheel's
        # requirements. OFI plugin 1.21.1 accepts NCCL 2.17.1 and later (its release notes).
        labels={
            "cuda-toolkit": "13.0", "least-driver": "580.65.06", "nccl": "2.29.7",
            "efa-installer": "1.50.0", "ofi-nccl": "1.21.1", "libfabric": "2.6.0amzn1.0",
        },
        source="docs.aws.amazon.com, EFA release notes of 1.50.0 (2026-08-21); torch 2.13.0+cu130",
    ),
    "cuda126-efa": ImageStack(
        base_image="docker.io/nvidia/cuda:12.6.3-base-ubuntu24.04",
        torch="2.13.0",
        wheel=WHEEL_OF_OLDER,
        # Driver: CUDA release notes, minimum of any toolkit of 12 on Linux.
        labels={
            "cuda-toolkit": "12.6", "least-driver": "525.60.13", "efa-installer": "1.50.0",
            "ofi-nccl": "1.21.1", "libfabric": "2.6.0amzn1.0",
        },
        source="as cuda-efa; torch's support matrix, RELEASE.md of 2.12 (2026-05-07)",
    ),
    "gaudi": ImageStack(
        base_image="vault.habana.ai/gaudi-docker/1.23.0/ubuntu24.04/habanalabs/"
        "pytorch-installer-2.9.0:latest",
        torch="2.9.0",
        wheel="hpu",
        labels={"gaudi-software": "1.23.0"},
        source="docs.habana.ai, support matrix of 1.23.0",
    ),
}  # fmt: skip
"""Kind -> what it is made of; a dlc is what its name says."""


_CUDA: tuple[Kind, ...] = ("cuda-efa", "cuda126-efa")


def without_code(accelerator: Accelerator) -> str | None:
    """A warning where the usual builds of torch, ours among them, have no code for a device."""
    capability = accelerator.capability
    if capability is None or capability >= OLDEST_CODE:
        return None
    return (
        f"{accelerator.name} has compute capability {capability[0]}.{capability[1]}, and torch's "
        "wheels for CUDA 12.8 and later have no code for it: an image of `shardyard image build "
        "--base cuda-efa` ends there at its first operation. Use one of `--base cuda126-efa`, or "
        f"torch {STACKS['cuda126-efa'].torch} of {wheels_for_older()}"
    )


@dataclass(frozen=True, kw_only=True)
class Base:
    """Base of an image."""

    kind: Kind
    image: str


# host[:port]/path[:tag][@digest], as the distribution project's reference grammar has it
_IMAGE = re.compile(
    r"(?:[a-zA-Z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


def parse_base(text: str) -> Base:
    """Read ``cpu``, ``cuda-efa``, ``cuda126-efa``, ``gaudi``, ``gaudi:IMAGE`` or ``dlc:IMAGE``; or
    the EC2 type of the machines, which says it.

    Raises:
        RequestError: It is none of them.
    """
    if text in instance_names():
        return base_for(instance(text).accelerator)
    word, _, image = text.partition(":")
    if word in STACKS and not image and text == word:
        kind: Kind = next(name for name in STACKS if name == word)
        return Base(kind=kind, image=STACKS[kind].base_image)
    if word in ("gaudi", "dlc") and is_image(image):
        return Base(kind="gaudi" if word == "gaudi" else "dlc", image=image)
    raise RequestError(
        f"--base {text!r} is not a base. Use cpu, cuda-efa, cuda126-efa (V100), gaudi, "
        "gaudi:IMAGE, dlc:IMAGE or an EC2 type, where IMAGE is a name such as "
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:TAG."
    )


def base_for(accelerator: Accelerator) -> Base:
    """Return the base of an image for a device.

    Raises:
        RequestError: None is known.
    """
    if accelerator.device == "cuda":
        older = accelerator.capability is not None and accelerator.capability < OLDEST_CODE
        return parse_base("cuda126-efa" if older else "cuda-efa")
    if accelerator.device == "hpu":
        return parse_base("gaudi")
    raise RequestError(
        f"no base is known for {accelerator.name}. Name an image with a torch for it: --base "
        "dlc:IMAGE."
    )


def is_image(text: str) -> bool:
    """Return whether a text is an image's name that no tool could take for an option."""
    return _IMAGE.fullmatch(text) is not None


def check_base_image(base: Base) -> None:
    """Reject a base that is known to lack a torch that is new enough.

    Raises:
        RequestError: The base lacks it.
    """
    if base == parse_base("gaudi"):
        stack = STACKS["gaudi"]
        raise RequestError(
            f"--base gaudi: {base.image} has torch {stack.torch}, and shardyard needs 2.11 or "
            f"newer. No newer image of Intel's was known when this was written ({stack.source}). "
            "Give a newer one with --base gaudi:IMAGE, or look at the file with --dry-run."
        )


def render_dockerfile(base: Base) -> str:
    """The whole Dockerfile."""
    has_own_torch = base.kind in ("gaudi", "dlc")
    parts = [_head(base), _WHEEL if has_own_torch else _torch_stage(base)]
    parts.append(_ON_ITS_TORCH if has_own_torch else _final_stage(base))
    parts.append(_end(base))
    return "\n".join(parts)


def write_context(folder: Path, base: Base) -> None:
    """Write all that the Dockerfile copies, from the installed package, and the Dockerfile.

    Raises:
        StorageError: The folder cannot be written.
    """
    write_text(folder / "Dockerfile", render_dockerfile(base))
    write_text(folder / "pyproject.toml", _project_file())
    write_text(folder / "constraints.txt", _constraints())
    package = Path(shardyard.__file__).parent
    shutil.copytree(
        package, folder / "src" / "shardyard", ignore=shutil.ignore_patterns("__pycache__")
    )


def _project_file() -> str:
    about = metadata("shardyard")
    required = needed_on_nodes(about.get_all("Requires-Dist") or [])
    listed = "".join(f"  {_quoted(text)},\n" for text in required)
    return (
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n\n'
        f'[project]\nname = "shardyard"\nversion = {_quoted(about["Version"])}\n'
        f"requires-python = {_quoted(about['Requires-Python'])}\ndependencies = [\n{listed}]\n\n"
        '[project.scripts]\nshardyard = "shardyard.cli:main"\n\n'
        '[tool.setuptools.packages.find]\nwhere = ["src"]\n\n'
        '[tool.setuptools.package-data]\nshardyard = ["**/*"]\n'
    )


_ON_NODES = ("aws", "fp8", "h5", "images", "mlflow", "parquet", "plots", "prometheus",
             "tensorboard", "wandb", "zstd")  # fmt: skip
"""Extras that a node of any recipe may need: all but those of the side that launches."""
_EXTRA = re.compile(r"""(?:;|\band)\s*extra\s*==\s*['"]([\w-]+)['"]""")


def needed_on_nodes(requirements: Iterable[str]) -> list[str]:
    """Return the package requirements that an image installs, without marks of extras."""
    found = []
    for text in requirements:
        extra = _EXTRA.search(text)
        if extra is None or extra[1] in _ON_NODES:
            found.append(_EXTRA.sub("", text).rstrip())
    return found


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _constraints() -> str:
    """Versions of this environment, so that the image runs what runs here; torch has its own."""
    versions = {each.name.lower(): each.version.partition("+")[0] for each in distributions()}
    kept = {name: text for name, text in versions.items() if name not in ("shardyard", "torch")}
    return "".join(f"{name}=={text}\n" for name, text in sorted(kept.items()))


# pip reads it. On a base with its own torch the image's history keeps it: never with a password.
_MIRROR = "ARG PIP_INDEX_URL\n"


def _head(base: Base) -> str:
    word = base.kind if base.kind != "dlc" else f"dlc:{base.image}"
    return f"""\
# Made by `shardyard image build --base {word} --dry-run`. Its context is written by the same verb:
# pyproject.toml, constraints.txt (versions of the environment that ran it) and src/.
ARG BASE_IMAGE={base.image}
"""


def _torch_stage(base: Base) -> str:
    stack = STACKS[base.kind]
    python = _APT_PYTHON.format(more="python3-venv") if base.kind in _CUDA else ""
    return f"""\
FROM ${{BASE_IMAGE}} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/shardyard/bin:$PATH
{python}RUN python3 -m venv /opt/shardyard
{_MIRROR}ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/{stack.wheel}
COPY constraints.txt /src/
# torch by itself: its layer is the largest and changes least
RUN pip install --extra-index-url "$TORCH_INDEX_URL" \\
        -c /src/constraints.txt torch=={stack.torch}+{stack.wheel}
COPY pyproject.toml /src/
COPY src /src/src
RUN pip install -c /src/constraints.txt /src
"""


_APT_PYTHON = """\
RUN apt-get update \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
        ca-certificates python3 {more} \\
 && rm -rf /var/lib/apt/lists/*
"""

_WHEEL = f"""\
FROM ${{BASE_IMAGE}} AS build
{_MIRROR}COPY pyproject.toml /src/
COPY src /src/src
RUN python3 -m pip wheel --no-cache-dir --no-deps -w /wheels /src
"""

# Its torch is pinned to what is there: the wheel of the same version lacks the device.
_ON_ITS_TORCH = f"""\
FROM ${{BASE_IMAGE}}
USER root
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
{_MIRROR}COPY --from=build /wheels /wheels
RUN python3 -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' \\
        > /tmp/torch.txt \\
 && python3 -m pip install -c /tmp/torch.txt /wheels/*.whl \\
 && rm -rf /wheels /tmp/torch.txt
RUN useradd --no-log-init --uid {USER_ID} --create-home shardyard
"""


def _final_stage(base: Base) -> str:
    # torch.compile calls a C compiler and Python's headers while it trains; htop and nvtop (of
    # Ubuntu's multiverse, which its images have) are for whoever opens a shell in a container
    efa = ""
    if base.kind in _CUDA:
        efa = _APT_PYTHON.format(more="python3-dev gcc libc6-dev curl htop nvtop") + _EFA.format(
            installer=STACKS[base.kind].labels["efa-installer"]
        )
    return f"""\
FROM ${{BASE_IMAGE}}
{efa}COPY --from=build /opt/shardyard /opt/shardyard
ENV PATH=/opt/shardyard/bin:$PATH
RUN useradd --no-log-init --uid {USER_ID} --create-home shardyard
"""


# No FI_* and NCCL_* variables: the plugin's table of platforms knows better than a file.
_EFA = """\
ARG EFA_INSTALLER={installer}
# SHA-256 of the installer, checked where it is given
ARG EFA_INSTALLER_SHA256=
RUN curl -fsSL -o /tmp/efa.tar.gz \\
        "https://efa-installer.amazonaws.com/aws-efa-installer-${{EFA_INSTALLER}}.tar.gz" \\
 && if [ -n "${{EFA_INSTALLER_SHA256}}" ]; then \\
        echo "${{EFA_INSTALLER_SHA256}}  /tmp/efa.tar.gz" | sha256sum -c -; fi \\
 && tar -xzf /tmp/efa.tar.gz -C /tmp \\
 && cd /tmp/aws-efa-installer \\
 && apt-get update \\
 && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \\
 && rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/*
# NCCL looks for libnccl-net.so on the linker's path; an image without it would use sockets
RUN plugin="$(find /opt/amazon -name 'libnccl-net*.so' | sort | head -n 1)" \\
 && test -n "$plugin" \\
 && folder="$(dirname "$plugin")" \\
 && if [ ! -e "$folder/libnccl-net.so" ]; then ln -s "$plugin" "$folder/libnccl-net.so"; fi \\
 && printf '%s\\n' "$folder" /opt/amazon/efa/lib > /etc/ld.so.conf.d/000-efa.conf \\
 && ldconfig
"""


def _end(base: Base) -> str:
    stack = STACKS.get(base.kind)
    labels = {
        "org.opencontainers.image.title": "shardyard",
        "org.opencontainers.image.version": shardyard.__version__,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": base.image,
    }
    if stack is not None:
        labels["shardyard.torch"] = stack.torch
        labels |= {f"shardyard.{name}": value for name, value in stack.labels.items()}
    lines = " \\\n".join(f'      {name}="{value}"' for name, value in labels.items())
    return f"""\
RUN python3 -c 'from shardyard.config.versions import check_packages; check_packages()'
LABEL {lines.strip()}
ENV PYTHONUNBUFFERED=1
USER {USER_ID}:{USER_ID}
WORKDIR /home/shardyard
CMD ["shardyard", "--help"]
"""
