"""Amazon ECR: the repository that an image goes to, and a password that is kept nowhere."""

import base64
import re
from dataclasses import dataclass

from shardyard.io.aws import aws_client, aws_session, error_code, translate_aws_errors

# docs.aws.amazon.com/AmazonECR, private registries; .com.cn is China's partition
_HOST = re.compile(
    r"(?P<host>(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com"
    r"(?:\.cn)?)/(?P<repository>[a-z0-9][a-z0-9._/-]*)"
)

_NO_IMAGE = "ImageNotFoundException"


@dataclass(frozen=True, kw_only=True)
class Registry:
    """One repository in somebody's private registry."""

    host: str
    account: str
    region: str
    repository: str

    def credentials(self) -> tuple[str, str]:
        """User and password, valid for 12 hours.

        Raises:
            AccessError: AWS does not let this user in.
        """
        client = aws_client(aws_session(self.region), "ecr")
        with translate_aws_errors("log in to ECR", self.region):
            answer = client.get_authorization_token(registryIds=[self.account])
        token = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
        user, _, password = token.partition(":")
        return user, password

    def size_bytes(self, image: str) -> int | None:
        """Compressed size of an image of this repository; None: it is not there.

        Args:
            image: Its whole name, with tag or digest.

        Raises:
            AccessError: AWS does not let this user look.
        """
        import botocore.exceptions as aws

        client = aws_client(aws_session(self.region), "ecr")
        with translate_aws_errors(f"look for {image}", self.region):
            try:
                answer = client.describe_images(
                    registryId=self.account,
                    repositoryName=self.repository,
                    imageIds=[self._image_id(image)],
                )
            except aws.ClientError as error:
                if error_code(error) not in ("RepositoryNotFoundException", _NO_IMAGE):
                    raise
                return None
        return int(answer["imageDetails"][0].get("imageSizeInBytes", 0))

    def _image_id(self, image: str) -> dict[str, str]:
        version = image.removeprefix(f"{self.host}/{self.repository}")
        tag, _, digest = version.partition("@")
        return {"imageDigest": digest} if digest else {"imageTag": tag.lstrip(":") or "latest"}

    def create(self) -> bool:
        """Create the repository where it is missing; says whether it was.

        Tags cannot be moved and images are scanned: what a recipe names does not change under it.

        Raises:
            AccessError: AWS does not let this user create it.
        """
        import botocore.exceptions as aws

        client = aws_client(aws_session(self.region), "ecr")
        with translate_aws_errors(f"create the ECR repository {self.repository}", self.region):
            try:
                client.create_repository(
                    registryId=self.account,
                    repositoryName=self.repository,
                    imageTagMutability="IMMUTABLE",
                    imageScanningConfiguration={"scanOnPush": True},
                    tags=[{"Key": "created-by", "Value": "shardyard"}],
                )
            except aws.ClientError as error:
                if error_code(error) != "RepositoryAlreadyExistsException":
                    raise
                return False
        return True


def ecr_registry(image: str) -> Registry | None:
    """The ECR repository that an image's name means; None: another registry."""
    found = _HOST.match(image)
    return Registry(**found.groupdict()) if found else None
