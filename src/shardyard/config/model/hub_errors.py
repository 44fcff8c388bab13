"""Errors of the Hugging Face hub: what its client raises, reported with a remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.parse import urlsplit

from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_OF_A_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR,
    errno.ENAMETOOLONG, errno.ESTALE,
)  # fmt: skip
"""Error numbers of a file system; those of a connection count as an unreachable hub."""


HubSetting = Literal["model.hub", "data.tokenizer", "data.source"]
_REVISION: dict[HubSetting, str] = {
    "model.hub": "name one with model.revision; null takes the newest of the default branch",
    "data.tokenizer": "write one behind the name, owner/name@revision",
    "data.source": "write one behind the name, hf://owner/name@revision",
}
_FOLDER: dict[HubSetting, str] = {
    "model.hub": "give its folder with model.path",
    "data.tokenizer": "give its folder instead of the name",
    "data.source": "give its folder instead of the address",
}


HUB_PAGE = "troubleshooting#hub-offline-or-gated-model"


class HubOfflineError(RequestError):
    """HF_HUB_OFFLINE is set, and what is wanted is not here."""

    page = HUB_PAGE


@contextmanager
def translate_hub_errors(words: str, *, setting: HubSetting) -> Iterator[None]:
    """Turn what huggingface_hub raises into one of our errors.

    Args:
        words: The setting and its value, with the revision.
        setting: The setting of the request, for the remedy.

    Raises:
        RequestError: There is no such repository, revision or file; or HF_HUB_OFFLINE is set.
        AccessError: A token is missing, wrong, or of somebody who may not read it.
        CapacityError: The hub cannot be reached, or the connection broke.
        OSError: The file system reported an error.
    """
    try:
        yield
    except ShardyardError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_A_DISK and not _is_answer(error):
            raise
        found = _translate_error(error, words, setting)
        if isinstance(found, ShardyardError):
            found.page = HUB_PAGE
        raise found from error


def _translate_error(error: Exception, words: str, setting: HubSetting) -> Exception:
    from huggingface_hub import errors

    for cause in (error, error.__cause__):
        match cause:
            case UnicodeEncodeError():
                return RequestError(
                    f"{words}: the token of this process holds "
                    f"{cause.object[cause.start : cause.end]!a}, which no token can hold. An "
                    "editor or a chat may have changed it. Copy it again: `hf auth login`, or set "
                    "HF_TOKEN."
                )
            case errors.GatedRepoError():
                return _gated(words)
            case errors.RepositoryNotFoundError():
                return _missing_repository_error(words)
            case errors.RevisionNotFoundError():
                return RequestError(
                    f"{words}: the repository has no such branch, tag or commit (any more). Look "
                    f"at its page for those that it has, and {_REVISION[setting]}."
                )
            case errors.HFValidationError():
                return RequestError(
                    f"{words} is not a name of a repository: {_first_line(cause)} Write owner/name."
                )
            case errors.HfHubHTTPError() if cause.response.status_code in (401, 403):
                return AccessError(
                    f"{words}: the hub refuses the token that this process has "
                    f"({_first_line(cause)}). Make another one that may read, and log in with `hf "
                    "auth login` or set HF_TOKEN."
                )
            case errors.OfflineModeIsEnabled():
                return HubOfflineError(_offline(words, setting))
    if isinstance(error, errors.LocalEntryNotFoundError) and _is_offline():
        return HubOfflineError(_offline(words, setting))
    if is_connection_error(error):
        return CapacityError(
            f"{words} is not on this machine whole, and the Hugging Face hub cannot be reached"
            f"{_by_proxy()} ({_reason(error)}). Finished files are kept. Check the network and do "
            f"the same again, or fetch it elsewhere and {_FOLDER[setting]}."
        )
    return error


def _gated(words: str) -> AccessError:
    which = "its token is of somebody who has not" if _has_token() else "it has no token"
    return AccessError(
        f"{words}: the hub gives the files only to those who have accepted its terms, and "
        f"this process cannot show that: {which}. Accept them on its page, then log in "
        "with `hf auth login` or set HF_TOKEN; for launched nodes, `secrets: {HF_TOKEN: ...}` in "
        "the recipe."
    )


def _missing_repository_error(words: str) -> RequestError:
    who = "the token of this process" if _has_token() else "somebody without a token"
    return RequestError(
        f"{words}: the Hugging Face hub has no such repository, or it is private and {who} may not "
        "see it. Check the name (owner/name); for a private one log in with `hf auth login` or set "
        "HF_TOKEN."
    )


def _offline(words: str, setting: HubSetting) -> str:
    return (
        f"{words} is not on this machine whole, and HF_HUB_OFFLINE forbids to ask the Hugging Face "
        f"hub. Unset it, or fetch it elsewhere and {_FOLDER[setting]}."
    )


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_answer(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, errors.HfHubHTTPError | errors.EntryNotFoundError)


def is_connection_error(error: Exception) -> bool:
    """Whether a request got no answer, or the connection broke within one."""
    of_http = type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES
    of_xet = type(error).__module__.partition(".")[0] == "hf_xet" or "Xet" in type(error).__name__
    return of_http or of_xet or isinstance(error, OSError)


def _by_proxy() -> str:
    """The proxy that a request to the hub goes through, without its credentials."""
    from urllib.request import (  # type: ignore[attr-defined]  # typeshed has one for macOS alone
        getproxies_environment,
        proxy_bypass_environment,
    )

    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    proxies = getproxies_environment()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    if not proxy or proxy_bypass_environment(hub.hostname or ""):
        return ""
    where = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    return f" through the proxy {where.hostname}:{where.port} ({hub.scheme.upper()}_PROXY)"


def _reason(error: Exception) -> str:
    """The cause of a broken connection, without the addresses that messages repeat."""
    cause = error.__cause__ if error.__cause__ is not None else error
    line = _first_line(cause)
    return line if line.startswith(type(cause).__name__) else f"{type(cause).__name__}: {line}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
