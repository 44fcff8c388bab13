"""Pushes of a model folder to the Hugging Face hub, each as one commit.

Large files are sent first, one by one. The hub keeps each under its SHA-256, so a killed call can
be repeated and sends only missing files. A reader of the repository sees the state before or after
the commit.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.model.hub import hide_bars_in_logs
from shardyard.config.model.hub_errors import is_connection_error
from shardyard.errors import AccessError, DataError, LostError, RequestError, ShardyardError
from shardyard.io.digests import COMPLETE, FolderDigests, parse_digests
from shardyard.transfer.download import ProgressCallback
from shardyard.units import format_bytes

CARD = "README.md"
"""File of the model card, which the hub shows as the repository's page."""

_ADDRESS = re.compile(
    r"hf://(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<branch>[\w.-]+(?:/[\w.-]+)*))?",
    re.ASCII,
)
_BELONGS_TO_NO_EXPORT = frozenset({CARD, ".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt"})
"""Files of a repository that a push may find and keeps."""


@dataclass(frozen=True, kw_only=True)
class HubRepository:
    """A model repository and the branch to push to."""

    name: str
    """``owner/name``."""
    branch: str

    def __str__(self) -> str:
        at = "" if self.branch == "main" else f"@{self.branch}"
        return f"hf://{self.name}{at}"


@dataclass(frozen=True, kw_only=True)
class HubState:
    """State of a repository and its branch before a push."""

    commit: str | None
    """Newest commit of the branch; None: the repository has no such branch yet."""
    export: FolderDigests | None
    """The export it holds; None: none."""
    card: str | None
    """Text of its model card; None: it has none."""
    is_private: bool
    """Whether only its owner sees the repository."""


def is_hub(text: str) -> bool:
    """Whether a text names a place on the Hugging Face hub."""
    return text.startswith("hf:")


def parse_repository(text: str) -> HubRepository:
    """Read ``hf://owner/name`` or ``hf://owner/name@branch``.

    Raises:
        RequestError: It is neither.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or found["name"].startswith(("datasets/", "spaces/")):
        raise RequestError(
            f"{text!r} is not a model repository of the Hugging Face hub. Give hf://owner/name, or "
            "hf://owner/name@branch, such as hf://acme/llama2-7b-tuned."
        )
    return HubRepository(name=found["name"], branch=found["branch"] or "main")


def check_repository(repository: HubRepository) -> HubState | None:
    """Read what a branch holds, before hours go into what is to be pushed there.

    Returns:
        None: there is no such repository yet.

    Raises:
        AccessError: No token, one that may only read, or one of somebody without access.
        RequestError: The branch holds files of something else.
        LostError: The hub cannot be reached.
    """
    from huggingface_hub import HfApi, errors, get_token

    if get_token() is None:
        raise AccessError(
            f"{repository}: this process has no token of the Hugging Face hub. Make one that may "
            "write at https://huggingface.co/settings/tokens, then log in with `hf auth login` or "
            "set HF_TOKEN."
        )
    api = HfApi()
    with _hub_errors("read", repository):
        identity = api.whoami()
        token: Any = identity.get("auth", {}).get("accessToken", {})
        if token.get("role") == "read":
            raise AccessError(
                f"{repository}: the token {token.get('displayName', '')!r} of "
                f"{identity.get('name', 'this user')} may only read. Make one that may write at "
                "https://huggingface.co/settings/tokens, then log in with `hf auth login` or set "
                "HF_TOKEN."
            )
        try:
            info = api.model_info(repository.name, revision=repository.branch)
        except errors.RepositoryNotFoundError:
            return None
        except errors.RevisionNotFoundError:
            is_private = bool(api.model_info(repository.name).private)
            return HubState(commit=None, export=None, card=None, is_private=is_private)
        names = {each.rfilename for each in info.siblings or ()}
        content = {
            name: Path(api.hf_hub_download(repository.name, name, revision=info.sha)).read_bytes()
            for name in (COMPLETE, CARD)
            if name in names
        }
    export = _read_export(repository, content.get(COMPLETE))
    others = sorted(names - _BELONGS_TO_NO_EXPORT - {COMPLETE, *(export.files if export else ())})
    if others:
        raise RequestError(
            f"{repository} holds {others[0]!r}"
            + (f" and {len(others) - 1} more files" if len(others) > 1 else "")
            + ", which no export of shardyard wrote there. Give another name, or another branch: "
            f"hf://{repository.name}@shardyard"
        )
    card = content.get(CARD)
    return HubState(
        commit=str(info.sha),
        is_private=bool(info.private),
        export=export,
        card=None if card is None else card.decode("utf-8", errors="replace"),
    )


def _read_export(repository: HubRepository, content: bytes | None) -> FolderDigests | None:
    if content is None:
        return None
    try:
        return parse_digests(content)
    except DataError as error:
        raise RequestError(
            f"{repository} holds a {COMPLETE} that no export wrote: {error}. Give another name or "
            "another branch."
        ) from error


def push(
    repository: HubRepository,
    state: HubState | None,
    folder: Path,
    complete: FolderDigests,
    *,
    card: str | None,
    is_public: bool,
    on_progress: ProgressCallback,
) -> bool:
    """Push the files of an export and ``complete.json`` as one commit, on top of what is there.

    Files of the export before it that this one does not have are removed; the history keeps them.

    Args:
        state: What ``check_repository`` found. Commits that came after it are an error.
        card: Text of the model card; None: the repository's own stays as it is.
        is_public: Whether a new repository is public. An existing one stays as it is.
        on_progress: Called with the bytes that are there now.

    Returns:
        Whether anything was missing.

    Raises:
        AccessError: The token may not write there.
        RequestError: Somebody pushed in between.
        LostError: The connection broke.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    hide_bars_in_logs()
    api = HfApi()
    old = None if state is None else state.export
    is_same = old is not None and old.text() == complete.text()
    if is_same and state is not None and card in (None, state.card):
        for name, digest in sorted(complete.files.items()):
            on_progress(name, digest.bytes)
        return False
    with _hub_errors("write to", repository):
        gone = set() if old is None else set(old.files) - set(complete.files)
        commit = None if state is None else state.commit
        if state is None:
            api.create_repo(repository.name, private=not is_public, exist_ok=True)
        if commit is None and repository.branch != "main":
            api.create_branch(repository.name, branch=repository.branch, exist_ok=True)
            # a new branch begins with the files of main, which stay there
            others = set(api.list_repo_files(repository.name, revision=repository.branch))
            gone = others - _BELONGS_TO_NO_EXPORT - {COMPLETE, *complete.files}
        operations: list[Any] = []
        for name, digest in sorted({} if is_same else complete.files.items()):
            file = CommitOperationAdd(name, folder / name)
            api.preupload_lfs_files(
                repository.name, additions=[file], revision=repository.branch, num_threads=1
            )
            operations.append(file)
            on_progress(name, digest.bytes)
        if not is_same:
            operations.append(CommitOperationAdd(COMPLETE, complete.text().encode()))
        if card is not None:
            operations.append(CommitOperationAdd(CARD, card.encode()))
        operations += [CommitOperationDelete(name) for name in sorted(gone)]
        api.create_commit(
            repository.name,
            operations,
            commit_message=_commit_subject(complete),
            revision=repository.branch,
            parent_commit=commit,
        )
    return True


def _commit_subject(complete: FolderDigests) -> str:
    step = complete.provenance.get("step")
    at = f" of step {step}" if isinstance(step, int) else ""
    return f"Export the weights{at}, {format_bytes(complete.bytes)}"


@contextmanager
def _hub_errors(action: str, repository: HubRepository) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except ShardyardError:
        raise
    except errors.OfflineModeIsEnabled as error:
        raise RequestError(
            f"{repository}: HF_HUB_OFFLINE forbids to ask the Hugging Face hub. Unset it, or "
            "export to a folder."
        ) from error
    except Exception as error:
        # the client wraps what goes wrong with a large file
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        assert isinstance(cause, Exception)
        if isinstance(cause, errors.HfHubHTTPError):
            raise _http_error(cause, action, repository) from error
        if not is_connection_error(cause):
            raise
        raise LostError(
            f"cannot {action} {repository}: the connection to the Hugging Face hub broke "
            f"({type(cause).__name__}). Repeat the command; files that arrived are not sent again."
        ) from error


def _http_error(error: Any, action: str, repository: HubRepository) -> ShardyardError:
    """Turn the hub's refusal into one of our errors."""
    status, words = error.response.status_code, str(error).strip().splitlines()[-1]
    if status in (401, 403):
        owner = repository.name.partition("/")[0]
        return AccessError(
            f"cannot {action} {repository}: the hub denies it to the token of this process "
            f"({status}: {words}). Use a token that may write for {owner}: `hf auth login`, or set "
            "HF_TOKEN."
        )
    if status in (409, 412):
        return RequestError(
            f"cannot {action} {repository}: somebody pushed there since this command began "
            f"({status}: {words}). Repeat the command."
        )
    if status == 429 or status >= 500:
        return LostError(
            f"cannot {action} {repository}: the hub answered {status} ({words}). Repeat the "
            "command in some minutes; files that arrived are not sent again."
        )
    return RequestError(f"cannot {action} {repository}: the hub answered {status}: {words}")
