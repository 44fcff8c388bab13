"""Access to AWS, with its errors in our words: credentials, rights, no connection.

Only what is common to launching, to files in S3 and to text from there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardyard.errors import (
    AccessError,
    CapacityError,
    LostError,
    RequestError,
    ShardyardError,
)

_PAGE = "launch-aws-batch#iam-permissions"

INSTALL_HINT = (
    "AWS is reached through boto3, which is not installed. Install it: pip install 'shardyard[aws]'"
)

_CREDENTIAL_CODES = frozenset(
    {
        "AuthFailure", "ExpiredToken", "ExpiredTokenException", "IncompleteSignature",
        "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSignatureException",
        "MissingAuthenticationToken", "MissingAuthenticationTokenException", "OptInRequired",
        "RequestExpired", "SignatureDoesNotMatch", "UnrecognizedClientException",
    }
)  # fmt: skip
_ACCESS_CODES = frozenset(
    {
        "AccessDenied", "AccessDeniedException", "NotAuthorized", "Forbidden", "403",
        "UnauthorizedOperation", "UnauthorizedException",
    }
)  # fmt: skip
THROTTLING_CODES = frozenset(
    {
        "PriorRequestNotComplete", "ProvisionedThroughputExceeded",
        "RequestLimitExceeded", "RequestThrottled", "SlowDown", "Throttling",
        "ThrottlingException", "TooManyRequestsException", "429",
    }
)  # fmt: skip
_SERVER_CODES = frozenset(
    {"InternalFailure", "InternalServerError", "ServerException", "ServiceUnavailable"}
)


class UncertainError(CapacityError):
    """A call was sent and its answer lost: what it asked for may have been done."""


_NO_REGION = (
    "launch.aws_batch.region is not given, and your AWS configuration names none. A queue exists "
    "in one region only. Set launch.aws_batch.region, such as us-east-1."
)


def aws_session(region: str | None, *, no_region: str = _NO_REGION) -> Any:
    """Return a boto3 session in this region, or in that of the user's AWS configuration.

    Args:
        no_region: Message if no region is known.

    Raises:
        RequestError: boto3 is missing, or no region is known.
    """
    try:
        import boto3.session
    except ImportError as error:
        raise RequestError(INSTALL_HINT) from error
    with translate_aws_errors("read the AWS configuration", region or "?"):
        session = boto3.session.Session(region_name=region)
    if session.region_name is None:
        raise RequestError(no_region)
    return session


def aws_client(session: Any, service: str, *, retries: int = 6) -> Any:
    """A client that retries what was throttled, and waits no minutes for a dead endpoint.

    Args:
        retries: Calls in all; 1 for a call that must not be made twice.
    """
    from botocore.config import Config

    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": retries},
        user_agent_extra="shardyard",
    )
    with translate_aws_errors(f"reach {service}", session.region_name):
        return session.client(service, config=config)


@contextmanager
def translate_aws_errors(action: str, region: str) -> Iterator[None]:
    """Turn botocore's errors into ours.

    Args:
        action: What was tried, to follow "cannot": ``submit the job``.

    Raises:
        AccessError: Credentials or rights are missing.
        CapacityError: AWS is too busy, or cannot be reached.
        UncertainError: The answer was lost, or AWS failed.
        RequestError: AWS does not accept the request.
    """
    import botocore.exceptions as aws
    from botocore.parsers import ResponseParserError

    where = f"cannot {action} in {region}"
    try:
        yield
    except aws.ClientError as error:
        raise _translate_client_error(error, where) from error
    except aws.BotoCoreError as error:
        raise _translate_botocore_error(error, where) from error
    except ResponseParserError as error:  # a proxy's page
        raise UncertainError(
            f"{where}: this answer is not from AWS, but from something between you and AWS: look "
            f"at your proxy and AWS_ENDPOINT_URL. {_LOOK}"
        ) from error


_LOOK = (
    "AWS may have done it all the same. Look before you ask again: `shardyard status` for the run, "
    "or the AWS console."
)
_LOG_IN = (
    "Log in again (`aws sso login` or `aws configure`), and check with `aws sts "
    "get-caller-identity`."
)


# By name, as botocore gains classes; a subclass counts as its base.
_CREDENTIAL_ERRORS = frozenset(
    {
        "CredentialRetrievalError", "InvalidConfigError", "LoginError", "MetadataRetrievalError",
        "NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError",
        "RefreshWithMFAUnsupportedError", "SSOError", "TokenRetrievalError",
    }
)  # fmt: skip
_NOT_CONNECTED = frozenset({"ConnectionError", "EndpointConnectionError"})
_ANSWER_LOST = frozenset({"HTTPClientError"})  # read timeout, connection closed


def _translate_botocore_error(error: Exception, where: str) -> ShardyardError:
    names = {kind.__name__ for kind in type(error).__mro__}
    where = f"{where}: {_sentence(error)}"
    if names & _CREDENTIAL_ERRORS:
        return AccessError(f"{where} {_LOG_IN}", page=_PAGE)
    if names & _NOT_CONNECTED:
        return CapacityError(
            f"{where} No request was sent. Check the name of the region, your network and "
            "AWS_ENDPOINT_URL, then ask again."
        )
    if names & _ANSWER_LOST:
        return UncertainError(f"{where} {_LOOK}")
    if "ProfileNotFound" in names:
        return RequestError(
            f"{where} AWS_PROFILE names it. Use one that `aws configure list-profiles` shows."
        )
    return RequestError(f"{where} Check your AWS configuration and these settings.")


def error_code(error: Any) -> str:
    """Return AWS's code of the error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _translate_client_error(error: Any, where: str) -> ShardyardError:
    code = error_code(error)
    said = str(error.response.get("Error", {}).get("Message") or code).rstrip(".")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    where = f"{where}: {said} ({code})."
    if code in _CREDENTIAL_CODES:
        return AccessError(f"{where} AWS does not accept your credentials. {_LOG_IN}", page=_PAGE)
    if code in _ACCESS_CODES or status == 403:
        return AccessError(
            f"{where} Your credentials are valid but lack the right to {error.operation_name}. "
            "docs/launch-aws-batch.md has the policy that is needed; have it added to your role.",
            page=_PAGE,
        )
    if code in THROTTLING_CODES or status == 429:
        return CapacityError(
            f"{where} AWS throttled several requests in a row. Wait a minute, then ask again."
        )
    if code in _SERVER_CODES or status >= 500:
        return UncertainError(f"{where} AWS itself failed (health.aws.amazon.com). {_LOOK}")
    return RequestError(f"{where} Correct that and ask again.")


def _sentence(error: Exception) -> str:
    return f"{str(error).strip().rstrip('.')}."


def s3_client(*, attempts: int = 6) -> Any:
    """A client of S3, in the region and with the credentials that boto3 finds.

    Args:
        attempts: Calls in all, for what was throttled or got lost.

    Raises:
        RequestError: boto3 is missing, or its configuration is wrong.
    """
    try:
        import boto3.session
        from botocore.config import Config
    except ImportError as error:
        raise RequestError(INSTALL_HINT) from error
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": attempts},
        user_agent_extra="shardyard",
    )
    with translate_aws_errors("reach S3", "your AWS configuration"):
        session = boto3.session.Session()
        return session.client("s3", region_name=session.region_name or "us-east-1", config=config)


def code_of(error: ShardyardError) -> str:
    """Return AWS's code of the cause of this error; empty: it was no answer of AWS."""
    # botocore's errors of a lost connection have this attribute as well, and nothing in it
    has_answer = getattr(error.__cause__, "response", None) is not None
    return error_code(error.__cause__) if has_answer else ""


_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
     "301", "307"}
)  # fmt: skip
_LOST = frozenset(
    {"ConnectionError", "EndpointConnectionError", "HTTPClientError", "IncompleteReadError"}
)
"""botocore's, by name; a subclass counts as its base."""


@contextmanager
def translate_s3_errors(
    action: str, bucket: str, *, rights: str, retry_hint: str
) -> Iterator[None]:
    """Turn botocore's errors into ours, in the words of S3.

    Args:
        action: The action, to follow "cannot": ``read s3://bucket/key``.
        rights: The rights it needs.
        retry_hint: What to do once the connection is fixed.

    Raises:
        LostError: The connection broke, or S3 itself failed.
        AccessError: Credentials or rights are missing.
        RequestError: There is no such bucket, or it is in another region.
    """
    try:
        with translate_aws_errors(action, "S3"):
            yield
    except ShardyardError as error:
        told = _describe_s3_error(error, f"cannot {action}", bucket, rights, retry_hint)
        raise told from error.__cause__


def _describe_s3_error(
    error: ShardyardError, where: str, bucket: str, rights: str, retry_hint: str
) -> ShardyardError:
    cause = error.__cause__
    names = {kind.__name__ for kind in type(cause).__mro__}
    if names & _LOST:
        return LostError(
            f"{where}: {str(cause).strip().rstrip('.')}. Check the network and AWS_ENDPOINT_URL, "
            f"then {retry_hint}."
        )
    if "ClientError" not in names:
        return error
    answer: Any = getattr(cause, "response", {})
    code = error_code(cause)
    meta = answer.get("ResponseMetadata", {})
    if code == "NoSuchBucket":
        return RequestError(
            f"{where}: bucket {bucket!r} does not exist. Correct the name, or create it: aws s3 mb "
            f"s3://{bucket}"
        )
    if code in _ELSEWHERE:
        region = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region")
        known = f"in region {region}" if region else "in another region than was asked"
        return RequestError(
            f"{where}: the bucket is {known} ({code}). Say which: export "
            f"AWS_REGION={region or '<its region>'}, or set region in your AWS profile."
        )
    if code in ("AccessDenied", "AllAccessDisabled", "403", "Forbidden"):
        return AccessError(
            f"{where}: {answer.get('Error', {}).get('Message', code)} ({code}). Your credentials "
            f"are valid but lack a right. Needed are {rights}. On the nodes they are those of the "
            "job's role.",
            page=_PAGE,
        )
    if meta.get("HTTPStatusCode", 0) >= 500:
        return LostError(f"{where}: S3 itself failed ({code}). In a minute, {retry_hint}.")
    return error
