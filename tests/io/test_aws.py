"""Errors of botocore in our words, with the designed exit codes."""

import pytest

from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.io.aws import UncertainError, translate_aws_errors

exceptions = pytest.importorskip("botocore.exceptions", reason="needs shardyard[aws]")
ResponseParserError = pytest.importorskip("botocore.parsers").ResponseParserError


def client_error(code: str, message: str = "said so", status: int = 400) -> Exception:
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: Exception = exceptions.ClientError(answer, "SubmitJob")
    return error


def raised_for(error: Exception) -> ShardyardError:
    with (
        pytest.raises(ShardyardError) as raised,
        translate_aws_errors("submit the job", "us-east-1"),
    ):
        raise error
    assert str(raised.value).startswith("cannot submit the job in us-east-1: ")
    return raised.value


@pytest.mark.parametrize(
    ("error", "kind", "exit_code", "words"),
    [
        (client_error("ExpiredTokenException"), AccessError, 4, "aws sso login"),
        (client_error("UnrecognizedClientException"), AccessError, 4, "aws configure"),
        (client_error("AccessDeniedException"), AccessError, 4, "the right to SubmitJob"),
        (client_error("Odd", status=403), AccessError, 4, "the right to SubmitJob"),
        (client_error("TooManyRequestsException", status=429), CapacityError, 3, "Wait a minute"),
        (client_error("ClientException"), RequestError, 2, "said so"),
        (client_error("ServerException", status=500), UncertainError, 3, "shardyard status"),
        (exceptions.NoCredentialsError(), AccessError, 4, "aws sso login"),
        (exceptions.SSOTokenLoadError(error_msg="old"), AccessError, 4, "aws sso login"),
        (
            exceptions.PartialCredentialsError(provider="env", cred_var="KEY"),
            AccessError, 4, "aws configure",
        ),
        (
            exceptions.EndpointConnectionError(endpoint_url="http://x"),
            CapacityError, 3, "No request was sent",
        ),
        (
            exceptions.ConnectTimeoutError(endpoint_url="http://x"),
            CapacityError, 3, "No request was sent",
        ),
        (
            exceptions.ReadTimeoutError(endpoint_url="http://x"),
            UncertainError, 3, "may have done it all the same",
        ),
        (ResponseParserError("<html>"), UncertainError, 3, "look at your proxy"),
        (exceptions.ParamValidationError(report="odd"), RequestError, 2, "odd"),
        (exceptions.ProfileNotFound(profile="me"), RequestError, 2, "me"),
    ],
)  # fmt: skip
def test_each_error_has_its_kind_and_the_next_step(
    error: Exception, kind: type[ShardyardError], exit_code: int, words: str
) -> None:
    found = raised_for(error)
    assert type(found) is kind
    assert found.exit_code == exit_code
    assert words in str(found)


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), translate_aws_errors("submit the job", "us-east-1"):
        raise KeyError("a defect of ours")
