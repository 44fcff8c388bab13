"""Checks AWS for a run: credentials, queue, instances, roles, logs, quota, image, secrets.

The checks change no resource and read no secret. A question that this user lacks the right
to ask is a warning. The instance's role pulls an image, and the execution role reads
secrets; both are checked with IAM.
"""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from shardyard.config.machines import capacity_of
from shardyard.config.secrets import Reference, parse_references
from shardyard.doctor.finding import Finding, gather
from shardyard.errors import ShardyardError
from shardyard.image.ecr import Registry, ecr_registry
from shardyard.image.registry import find_image
from shardyard.io.aws import aws_client, aws_session, error_code, translate_aws_errors
from shardyard.launchers.aws_batch.queue import check_queue, environments_of, queue_named
from shardyard.launchers.aws_batch.requests import LOG_GROUP, chosen_instance, job_definition
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.node_rank import PORT

QUOTAS = {"p": "L-417A185B", "g": "L-DB2E81BA", "dl": "L-6E869C2A"}
"""Family -> code of the quota "Running On-Demand ... instances", in vCPUs. Source: EC2 User Guide,
On-Demand Instance quotas."""

HOW_TO_MAKE_ONE = (
    "`shardyard cluster create kind=batch recipe=RECIPE name=QUEUE` makes one; "
    "docs/verbs/cluster.md lists its other settings"
)

_PULL = ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_NO_ENTITY = "NoSuchEntity"
_STOP_TIMEOUT = re.compile(r"ECS_CONTAINER_STOP_TIMEOUT=(\d+)s")


@dataclass
class _Account:
    """The account to ask, and the request to check."""

    request: LaunchRequest
    session: Any
    make_client: Callable[[Any, str], Any]
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def region(self) -> str:
        return str(self.session.region_name)

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self.make_client(self.session, service)
        return self._clients[service]

    def find(self, action: str, call: Callable[[], Any], *, missing: str) -> Any:
        """The answer to a call; None if the error says that there is no such thing."""
        import botocore.exceptions as aws

        with translate_aws_errors(action, self.region):
            try:
                return call()
            except aws.ClientError as error:
                if error_code(error) != missing:
                    raise
                return None

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """Compute environments of the queue."""
        batch = self.client("batch")
        queue = queue_named(batch, str(self.request.recipe.launch.aws_batch.queue))
        return environments_of(batch, queue)

    @cached_property
    def instance_roles(self) -> dict[str, str | None]:
        """Instance profiles of the queue's environments -> ARN of their role; None: missing."""
        iam, found = self.client("iam"), {}
        for resources in map(_resources, self.environments):
            # An environment may name the profile by its name or by its ARN.
            name = str(resources.get("instanceRole", "")).rpartition("/")[2]
            if name:
                get = partial(iam.get_instance_profile, InstanceProfileName=name)
                answer = self.find("look for the instance profile", get, missing=_NO_ENTITY)
                roles = answer["InstanceProfile"]["Roles"] if answer else []
                found[name] = str(roles[0]["Arn"]) if roles else None
        return found


def batch_checks(
    request: LaunchRequest, *, make_client: Callable[[Any, str], Any] = aws_client
) -> list[Finding]:
    """All that AWS can be asked before a job is submitted.

    Args:
        make_client: From a session and the name of a service.
    """
    try:
        session = aws_session(request.recipe.launch.aws_batch.region)
    except ShardyardError as error:
        return [Finding(name="credentials", verdict="problem", what=str(error))]
    account = _Account(request, session, make_client)
    # Without credentials each further question would fail with the same words.
    found = gather({"credentials": partial(_credentials, account)}, essential="credentials")
    if found[0].verdict == "problem":
        return found
    checks = {
        "queue": _queue, "instances": _instances, "task network": _task_networks,
        "roles": _roles, "log group": _log_group, "quota": _quota, "image": _image,
        "secrets": _secrets,
    }  # fmt: skip
    asked = {name: partial(check, account) for name, check in checks.items()}
    return found + gather(asked, essential="queue")


def _credentials(account: _Account) -> Iterator[Finding]:
    sts = account.client("sts")
    with translate_aws_errors("ask who you are", account.region):
        answer = sts.get_caller_identity()
    what = f"{answer['Arn']} in {account.region}"
    yield Finding(name="credentials", verdict="ok", what=what)


def _queue(account: _Account) -> Iterator[Finding]:
    name = str(account.request.recipe.launch.aws_batch.queue)
    try:
        check_queue(account.client("batch"), name, job_definition(account.request))
    except ShardyardError as error:
        yield Finding(name="queue", verdict="problem", what=str(error), mend=HOW_TO_MAKE_ONE)
    else:
        names = ", ".join(row["computeEnvironmentName"] for row in account.environments)
        yield Finding(name="queue", verdict="ok", what=f"{name} takes the job, on {names}")


def _instances(account: _Account) -> Iterator[Finding]:
    """Whether instances come with what the containers ask for."""
    for environment in account.environments:
        resources = _resources(environment)
        name, ec2 = environment["computeEnvironmentName"], account.client("ec2")
        template = _template(account, ec2, resources.get("launchTemplate") or {})
        yield from _efa(account, name, template)
        yield from _capacity(account, name, template)
        is_grouped = bool(resources.get("placementGroup"))
        if account.request.nodes > 1 and not is_grouped and _reservation(account) is None:
            yield Finding(
                name="placement group", verdict="warning",
                what=f"compute environment {name} has none: nodes may be far from each other, "
                "and collectives slow",
                mend=HOW_TO_MAKE_ONE,
            )  # fmt: skip
        yield _stop_time(account, name, template)


def _reservation(account: _Account) -> str | None:
    """Id of the reservation or block that the recipe names."""
    capacity = capacity_of(account.request.recipe.cluster)
    return None if capacity is None else capacity.id


def _capacity(account: _Account, name: str, template: Mapping[str, Any]) -> Iterator[Finding]:
    wanted = _reservation(account)
    if wanted is None:
        return
    asked = template.get("CapacityReservationSpecification") or {}
    target = (asked.get("CapacityReservationTarget") or {}).get("CapacityReservationId")
    what = f"instances of {name} are rented from {target or 'no reservation'}"
    if target == wanted:
        yield Finding(name="capacity", verdict="ok", what=what)
        return
    yield Finding(
        name="capacity", verdict="problem", what=f"{what}, and cluster.capacity names {wanted}",
        mend=f"Use a queue that is made for it. {HOW_TO_MAKE_ONE}",
    )  # fmt: skip


def _template(account: _Account, ec2: Any, reference: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of a compute environment's launch template; empty if there is none."""
    by = {
        key[0].upper() + key[1:]: reference[key]
        for key in ("launchTemplateName", "launchTemplateId")
        if reference.get(key)
    }
    if not by:
        return {}
    # Batch takes the template's default version where the environment names none.
    versions = [reference.get("version") or "$Default"]
    with translate_aws_errors("look at the launch template", account.region):
        answer = ec2.describe_launch_template_versions(**by, Versions=versions)
    found = answer["LaunchTemplateVersions"]
    data: dict[str, Any] = found[0]["LaunchTemplateData"] if found else {}
    return data


def _efa(account: _Account, name: str, template: Mapping[str, Any]) -> Iterator[Finding]:
    machine = chosen_instance(account.request.recipe)
    if machine is None or not machine.efa_count:
        return
    interfaces = template.get("NetworkInterfaces") or []
    # `efa-only` interfaces count: they have the device and lack only an IP address.
    count = sum(str(row.get("InterfaceType", "")).startswith("efa") for row in interfaces)
    what = f"instances of {name} get {count} EFA interfaces, and {machine.name} has "
    what += str(machine.efa_count)
    if count >= machine.efa_count:
        yield Finding(name="EFA", verdict="ok", what=what)
    else:
        lacking = f"/dev/infiniband/uverbs{count}"
        yield Finding(
            name="EFA", verdict="problem",
            what=f"{what}: containers ask for {lacking}, which would not be there, and would not "
            "start",
            mend="Add them to the environment's launch template. For a new queue: "
            + HOW_TO_MAKE_ONE,
        )  # fmt: skip


def _task_networks(account: _Account) -> Iterator[Finding]:
    if account.request.nodes == 1:
        return
    for environment in account.environments:
        ec2 = account.client("ec2")
        template = _template(account, ec2, _resources(environment).get("launchTemplate") or {})
        if template.get("NetworkInterfaces"):
            yield from _task_network(account, ec2, environment)


def _task_network(account: _Account, ec2: Any, environment: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether nodes reach node 0 through the interface that ECS gives each container.

    It has the security groups of the compute environment; without any, the default one of the VPC.
    Batch refuses an environment with groups whose template has network interfaces, as EFA needs
    them. Source: AWS Batch User Guide, mnp-ce; github.com/aws/aws-cdk issue 21577.
    """
    resources = _resources(environment)
    with translate_aws_errors("look at the security groups", account.region):
        (subnet, *_) = ec2.describe_subnets(SubnetIds=resources["subnets"])["Subnets"]
        wanted = {"vpc-id": subnet["VpcId"], "group-name": "default"}
        filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
        groups = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    for group in groups:
        what = (
            f"containers of {environment['computeEnvironmentName']} get the VPC's default security "
            f"group, {group['GroupId']}, as its launch template has network interfaces"
        )
        if any(lets_in(rule, group["GroupId"]) for rule in group.get("IpPermissions", ())):
            what += f"; it lets itself in on port {PORT}"
            yield Finding(name="task network", verdict="ok", what=what)
            continue
        yield Finding(
            name="task network", verdict="problem",
            what=f"{what}, and it does not let itself in on port {PORT}: nodes would not meet",
            mend=f"aws ec2 authorize-security-group-ingress --region {account.region} --group-id "
            f"{group['GroupId']} --protocol tcp --port 0-65535 --source-group {group['GroupId']}",
        )  # fmt: skip


def lets_in(rule: Mapping[str, Any], group: str) -> bool:
    """Whether a rule lets members of a group reach the rendezvous; ranges of addresses count."""
    # -1 means every protocol, and such a rule has no ports.
    covers = rule["IpProtocol"] == "-1" or (
        rule["IpProtocol"] == "tcp" and rule["FromPort"] <= PORT <= rule["ToPort"]
    )
    pairs = [pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())]
    return covers and (group in pairs or bool(rule.get("IpRanges")))


def _stop_time(account: _Account, name: str, template: Mapping[str, Any]) -> Finding:
    text = base64.b64decode(template.get("UserData") or "").decode(errors="replace")
    found = _STOP_TIMEOUT.search(text)
    # 30 s is the ECS agent's own default.
    stop_s, drain_s = int(found[1]) if found else 30, account.request.recipe.elastic.drain_timeout_s
    what = f"instances of {name} give a container {stop_s} s to end, and a drain may take "
    what += f"{drain_s:g} s (elastic.drain_timeout_s)"
    if stop_s >= drain_s:
        return Finding(name="stop time", verdict="ok", what=what)
    return Finding(
        name="stop time", verdict="warning", what=what,
        mend=f"Set ECS_CONTAINER_STOP_TIMEOUT={drain_s + 30:g}s in /etc/ecs/ecs.config by the "
        "launch template's user data, or lower elastic.drain_timeout_s",
    )  # fmt: skip


def _roles(account: _Account) -> Iterator[Finding]:
    iam, settings = account.client("iam"), account.request.recipe.launch.aws_batch
    for name, arn in (("job_role", settings.job_role), ("execution_role", settings.execution_role)):
        if arn is None:
            continue
        # GetRole takes the name alone, and an ARN also has a path.
        get = partial(iam.get_role, RoleName=arn.rpartition("/")[2])
        answer = account.find("look for the role", get, missing=_NO_ENTITY)
        yield _role(f"launch.aws_batch.{name}", arn, answer)
    for profile, role in account.instance_roles.items():
        if role is None:
            yield Finding(
                name="instance role", verdict="problem",
                what=(
                    f"instance profile {profile} does not exist or has no role: no instance would "
                    "start"
                ),
                mend="Create it with the policy AmazonEC2ContainerServiceforEC2Role",
            )  # fmt: skip


def _role(setting: str, arn: str, answer: Any) -> Finding:
    if answer is None:
        return Finding(
            name=setting, verdict="problem", what=f"role {arn} does not exist",
            mend="Create it, or correct the setting",
        )  # fmt: skip
    trust = answer["Role"].get("AssumeRolePolicyDocument") or {}
    if "ecs-tasks.amazonaws.com" not in _trusted(trust):
        return Finding(
            name=setting, verdict="problem",
            what=f"{arn} does not trust ecs-tasks.amazonaws.com: no container would start",
            mend="Let that service assume it: `aws iam update-assume-role-policy`",
        )  # fmt: skip
    return Finding(name=setting, verdict="ok", what=f"{arn} can be assumed by containers")


def _trusted(policy: Mapping[str, Any]) -> set[str]:
    """Services that a trust policy lets assume its role."""
    # IAM accepts a single statement, or a single service, without a list around it.
    statements = policy.get("Statement") or []
    trusted: set[str] = set()
    for statement in statements if isinstance(statements, list) else [statements]:
        principal = statement.get("Principal") or {}
        services = principal.get("Service") or [] if isinstance(principal, dict) else []
        if statement.get("Effect") == "Allow":
            trusted |= {services} if isinstance(services, str) else set(services)
    return trusted


def _log_group(account: _Account) -> Iterator[Finding]:
    logs, name = account.client("logs"), account.request.recipe.launch.aws_batch.log_group
    with translate_aws_errors("look for the log group", account.region):
        answer = logs.describe_log_groups(logGroupNamePrefix=name)
    # The prefix of the question also matches longer names.
    if any(group["logGroupName"] == name for group in answer["logGroups"]):
        yield Finding(name="log group", verdict="ok", what=f"{name} is there")
        return
    mend = f"aws logs create-log-group --region {account.region} --log-group-name {name}"
    what = f"{name} does not exist yet. Batch makes it with an account's first job if its service "
    what += "role may; else no container starts"
    if name == LOG_GROUP:
        yield Finding(name="log group", verdict="warning", what=what, mend=mend)
    else:  # Batch makes no group of another name
        what = f"{name} does not exist (launch.aws_batch.log_group): no container would start"
        yield Finding(name="log group", verdict="problem", what=what, mend=mend)


def _quota(account: _Account) -> Iterator[Finding]:
    machine = chosen_instance(account.request.recipe)
    family = re.match("[a-z]+", machine.name) if machine else None
    code = QUOTAS.get(family[0]) if family else None
    if machine is None or code is None:
        return
    client, which = account.client("service-quotas"), {"ServiceCode": "ec2", "QuotaCode": code}
    get = partial(client.get_service_quota, **which)
    answer = account.find("ask for the quota", get, missing="NoSuchResourceException")
    if answer is None:  # never changed for this account
        with translate_aws_errors("ask for the quota", account.region):
            answer = client.get_aws_default_service_quota(**which)
    allowed, wanted = answer["Quota"]["Value"], account.request.nodes * machine.vcpus
    what = f"{answer['Quota']['QuotaName']}: {allowed:g} vCPUs, and the run needs {wanted}"
    if allowed >= wanted:
        yield Finding(name="quota", verdict="ok", what=f"{what}; what runs already is not counted")
    else:
        yield Finding(
            name="quota", verdict="problem", what=f"{what}: it would wait for ever",
            mend=f"aws service-quotas request-service-quota-increase --region {account.region} "
            f"--service-code ec2 --quota-code {code} --desired-value {wanted}, or fewer nodes",
        )  # fmt: skip


def _image(account: _Account) -> Iterator[Finding]:
    image = str(account.request.recipe.launch.image)
    found = find_image(image)
    yield found
    registry = ecr_registry(image)
    if registry is not None and found.verdict != "problem":
        yield from _pulls(account, registry)


def _pulls(account: _Account, registry: Registry) -> Iterator[Finding]:
    for role in filter(None, account.instance_roles.values()):
        partition = role.split(":")[1]
        arn = f"arn:{partition}:ecr:{registry.region}:{registry.account}:repository/"
        yield _may(
            account, role, _PULL, arn + registry.repository, name="image",
            fix="Attach AmazonEC2ContainerServiceforEC2Role to it, and where the repository is "
            "another account's, let its policy allow yours",
        )  # fmt: skip


def _secrets(account: _Account) -> Iterator[Finding]:
    recipe = account.request.recipe
    for name, reference in parse_references(recipe.secrets).items():
        setting, place = f"secrets.{name}", reference.name or name
        is_ssm = reference.kind == "ssm"
        arn = (_parameter if is_ssm else _secret)(account, place)
        if arn is None:
            service = "SSM parameter" if is_ssm else "secret"
            yield Finding(
                name=setting, verdict="problem",
                what=(
                    f"{service} {place} does not exist, or is being deleted: no container would "
                    "start"
                ),
                mend=_create(reference, place, account.region),
            )  # fmt: skip
            continue
        key = f", nor whether it has {reference.key}" if reference.key else ""
        yield Finding(
            name=setting, verdict="ok", what=f"{place} exists; its value was not read{key}"
        )
        role = recipe.launch.aws_batch.execution_role
        action = "ssm:GetParameters" if is_ssm else "secretsmanager:GetSecretValue"
        if role is not None:
            yield _may(
                account, role, (action,), arn, name=setting,
                fix=f"Allow {action} on {arn} in a policy of that role",
            )  # fmt: skip


def _secret(account: _Account, name: str) -> str | None:
    describe = partial(account.client("secretsmanager").describe_secret, SecretId=name)
    answer = account.find("look for the secret", describe, missing="ResourceNotFoundException")
    # Secrets Manager still describes a secret that is scheduled for deletion.
    return None if answer is None or answer.get("DeletedDate") else str(answer["ARN"])


def _parameter(account: _Account, name: str) -> str | None:
    """ARN of an SSM parameter. An ARN does not say whether the name begins with a slash."""
    tail = name.partition(":parameter/")[2]
    names = [tail, f"/{tail}"] if tail else [name]
    wanted = [{"Key": "Name", "Option": "Equals", "Values": names}]
    with translate_aws_errors("look for the parameter", account.region):
        found = account.client("ssm").describe_parameters(ParameterFilters=wanted)["Parameters"]
    return None if not found else str(found[0].get("ARN", name))


def _create(reference: Reference, name: str, region: str) -> str:
    if reference.kind == "ssm":
        return (
            f"aws ssm put-parameter --region {region} --type SecureString --name {name} --value "
            "file:///dev/stdin"
        )
    return (
        f"aws secretsmanager create-secret --region {region} --secret-string file:///dev/stdin "
        "--name NAME, and write its ARN into the recipe"
    )


def _may(
    account: _Account, role: str, actions: tuple[str, ...], resource: str, *, name: str, fix: str
) -> Finding:
    """Return IAM's verdict on a role's own policies; those of the resource are not included."""
    simulate = account.client("iam").simulate_principal_policy
    try:
        with translate_aws_errors("ask what the role may", account.region):
            answer = simulate(
                PolicySourceArn=role, ActionNames=list(actions), ResourceArns=[resource]
            )
    except ShardyardError as error:
        what = f"whether {role} may {actions[0]} cannot be asked: {error}"
        return Finding(name=name, verdict="warning", what=what)
    denied = [
        row["EvalActionName"]
        for row in answer["EvaluationResults"]
        if row["EvalDecision"] != "allowed"
    ]
    if denied:
        what = f"{role} may not {', '.join(denied)}: no container would start"
        return Finding(name=name, verdict="problem", what=what, mend=fix)
    return Finding(name=name, verdict="ok", what=f"{role} may {', '.join(actions)}")


def _resources(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    resources: Mapping[str, Any] = environment.get("computeResources") or {}
    return resources
