"""Network of a queue of AWS Batch: an existing one, or a CloudFormation stack of ours.

A VPC has a private subnet for instances and a public one for the NAT gateway. By it, they reach
ECR, Batch's own services and the Hub. S3 has an endpoint of its own, which is free.
"""

from dataclasses import dataclass
from typing import Any

from shardyard.cluster.eksctl import tags_of
from shardyard.cluster.spec import ClusterSpec

VPC_CIDR = "10.0.0.0/16"
PRIVATE_CIDR = "10.0.128.0/17"
"""32,763 addresses: 64 p5.48xlarge, the most of a group, need 33 each."""
PUBLIC_CIDR = "10.0.0.0/24"


@dataclass(frozen=True, kw_only=True)
class NetworkLocation:
    """Network location of instances."""

    vpc: str
    subnet: str


LATER = NetworkLocation(vpc="VPC", subnet="SUBNET")
"""In what a dry run prints of a network that is still to be made."""


def location_in_spec(spec: ClusterSpec) -> NetworkLocation | None:
    """The network that the description names; None: one is to be made."""
    if spec.vpc.id is None:
        return None
    return NetworkLocation(vpc=spec.vpc.id, subnet=spec.vpc.subnets[spec.zone])


def network_stack_name(spec: ClusterSpec) -> str:
    """Return the name of the stack in CloudFormation."""
    return f"shardyard-{spec.name}-network"


def render_network(spec: ClusterSpec, owner: str) -> dict[str, Any]:
    """The template of a new network in one zone, which is its parameter."""
    tags = [{"Key": key, "Value": value} for key, value in tags_of(spec, owner).items()]
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Network of {spec.name}",
        "Parameters": {"Zone": {"Type": "AWS::EC2::AvailabilityZone::Name"}},
        "Resources": {**_subnets(tags), **_egress(tags)},
        "Outputs": {
            "VPC": {"Value": _VPC},
            "SubnetsPrivate": {"Value": {"Ref": "PrivateSubnet"}},
            "SubnetsPublic": {"Value": {"Ref": "PublicSubnet"}},
        },
    }


_VPC = {"Ref": "Vpc"}


def _subnets(tags: list[dict[str, str]]) -> dict[str, Any]:
    """The VPC, and each subnet with its route table."""
    found = {
        "Vpc": _ec2_resource(
            "VPC", tags, CidrBlock=VPC_CIDR, EnableDnsSupport=True, EnableDnsHostnames=True
        )
    }
    for kind, block in (("Public", PUBLIC_CIDR), ("Private", PRIVATE_CIDR)):
        found |= {
            f"{kind}Subnet": _ec2_resource(
                "Subnet", tags, VpcId=_VPC, CidrBlock=block, AvailabilityZone={"Ref": "Zone"}
            ),
            f"{kind}Table": _ec2_resource("RouteTable", tags, VpcId=_VPC),
            f"{kind}Association": {
                "Type": "AWS::EC2::SubnetRouteTableAssociation",
                "Properties": {
                    "SubnetId": {"Ref": f"{kind}Subnet"},
                    "RouteTableId": {"Ref": f"{kind}Table"},
                },
            },
        }
    return found


def _egress(tags: list[dict[str, str]]) -> dict[str, Any]:
    """From the public subnet by the internet gateway, from the private by NAT; to S3 directly."""
    return {
        "Gateway": _ec2_resource("InternetGateway", tags),
        "GatewayAttachment": {
            "Type": "AWS::EC2::VPCGatewayAttachment",
            "Properties": {"VpcId": _VPC, "InternetGatewayId": {"Ref": "Gateway"}},
        },
        "Address": {**_ec2_resource("EIP", tags, Domain="vpc"), "DependsOn": "GatewayAttachment"},
        "Nat": _ec2_resource(
            "NatGateway",
            tags,
            AllocationId={"Fn::GetAtt": ["Address", "AllocationId"]},
            SubnetId={"Ref": "PublicSubnet"},
        ),
        "PublicRoute": {
            **_route("PublicTable", GatewayId={"Ref": "Gateway"}),
            "DependsOn": "GatewayAttachment",
        },
        "PrivateRoute": _route("PrivateTable", NatGatewayId={"Ref": "Nat"}),
        "S3": {
            "Type": "AWS::EC2::VPCEndpoint",
            "Properties": {
                "VpcId": _VPC,
                "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
                "VpcEndpointType": "Gateway",
                "RouteTableIds": [{"Ref": "PrivateTable"}],
            },
        },
    }


def _ec2_resource(kind: str, tags: list[dict[str, str]], **properties: Any) -> dict[str, Any]:
    return {"Type": f"AWS::EC2::{kind}", "Properties": {**properties, "Tags": tags}}


def _route(table: str, **target: Any) -> dict[str, Any]:
    properties = {"RouteTableId": {"Ref": table}, "DestinationCidrBlock": "0.0.0.0/0"}
    return {"Type": "AWS::EC2::Route", "Properties": properties | target}
