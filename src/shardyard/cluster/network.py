"""The network of a queue of AWS Batch: one that exists, or one of a CloudFormation stack of ours.

A VPC with a private subnet for instances and a public one for the NAT gateway, by which they reach
ECR, Batch's own services and the Hub. S3 has an endpoint of its own, which costs nothing.
"""

from dataclasses import dataclass
from typing import Any

from shardyard.cluster.eksctl import tags_of
from shardyard.cluster.spec import Description

VPC_CIDR = "10.0.0.0/16"
PRIVATE_CIDR = "10.0.128.0/17"
"""32,763 addresses: 64 p5.48xlarge, the most of a group, need 33 each."""
PUBLIC_CIDR = "10.0.0.0/24"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where instances lie."""

    vpc: str
    subnet: str


LATER = Place(vpc="VPC", subnet="SUBNET")
"""In what a dry run prints of a network that is still to be made."""


def place_named(given: Description) -> Place | None:
    """The network that the description names; None: one is to be made."""
    if given.vpc.id is None:
        return None
    return Place(vpc=given.vpc.id, subnet=given.vpc.subnets[given.zone])


def network_stack_name(given: Description) -> str:
    """Of the stack in CloudFormation."""
    return f"shardyard-{given.name}-network"


def render_network(given: Description, owner: str) -> dict[str, Any]:
    """The template of a new network in one zone, which is its parameter."""
    tags = [{"Key": key, "Value": value} for key, value in tags_of(given, owner).items()]
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Network of {given.name}",
        "Parameters": {"Zone": {"Type": "AWS::EC2::AvailabilityZone::Name"}},
        "Resources": {**_subnets(tags), **_ways_out(tags)},
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
        "Vpc": _made(
            "VPC", tags, CidrBlock=VPC_CIDR, EnableDnsSupport=True, EnableDnsHostnames=True
        )
    }
    for kind, block in (("Public", PUBLIC_CIDR), ("Private", PRIVATE_CIDR)):
        found |= {
            f"{kind}Subnet": _made(
                "Subnet", tags, VpcId=_VPC, CidrBlock=block, AvailabilityZone={"Ref": "Zone"}
            ),
            f"{kind}Table": _made("RouteTable", tags, VpcId=_VPC),
            f"{kind}Association": {
                "Type": "AWS::EC2::SubnetRouteTableAssociation",
                "Properties": {
                    "SubnetId": {"Ref": f"{kind}Subnet"},
                    "RouteTableId": {"Ref": f"{kind}Table"},
                },
            },
        }
    return found


def _ways_out(tags: list[dict[str, str]]) -> dict[str, Any]:
    """From the public subnet by the internet gateway, from the private by NAT; to S3 directly."""
    return {
        "Gateway": _made("InternetGateway", tags),
        "GatewayAttachment": {
            "Type": "AWS::EC2::VPCGatewayAttachment",
            "Properties": {"VpcId": _VPC, "InternetGatewayId": {"Ref": "Gateway"}},
        },
        "Address": {**_made("EIP", tags, Domain="vpc"), "DependsOn": "GatewayAttachment"},
        "Nat": _made(
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


def _made(kind: str, tags: list[dict[str, str]], **properties: Any) -> dict[str, Any]:
    return {"Type": f"AWS::EC2::{kind}", "Properties": {**properties, "Tags": tags}}


def _route(table: str, **target: Any) -> dict[str, Any]:
    properties = {"RouteTableId": {"Ref": table}, "DestinationCidrBlock": "0.0.0.0/0"}
    return {"Type": "AWS::EC2::Route", "Properties": properties | target}
