"""The network of a queue of AWS Batch: one that exists, or one of a CloudFormation stack of ours.

A VPC with a private subnet for instances and a public one for the NAT gateway, by which they reach
ECR, Batch's own services and the Hub. S3 has an endpoint of its own, which costs nothing.
"""

from dataclasses import dataclass
from typing import Any

from shardyard.cluster.description import Description
from shardyard.cluster.eksctl import tags_of

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


def network_stack_name(given: Description) -> str:
    """Of the stack in CloudFormation."""
    return f"shardyard-{given.name}-network"


def render_network(given: Description, owner: str) -> dict[str, Any]:
    """The template of a new network in one zone, which is its parameter."""
    tags = [{"Key": key, "Value": value} for key, value in tags_of(given, owner).items()]

    def made(kind: str, **properties: Any) -> dict[str, Any]:
        return {"Type": f"AWS::EC2::{kind}", "Properties": {**properties, "Tags": tags}}

    def route(table: str, **target: Any) -> dict[str, Any]:
        properties = {"RouteTableId": {"Ref": table}, "DestinationCidrBlock": "0.0.0.0/0"}
        return {"Type": "AWS::EC2::Route", "Properties": properties | target}

    def associated(subnet: str, table: str) -> dict[str, Any]:
        properties = {"SubnetId": {"Ref": subnet}, "RouteTableId": {"Ref": table}}
        return {"Type": "AWS::EC2::SubnetRouteTableAssociation", "Properties": properties}

    vpc = {"Ref": "Vpc"}
    resources = {
        "Vpc": made("VPC", CidrBlock=VPC_CIDR, EnableDnsSupport=True, EnableDnsHostnames=True),
        "Gateway": made("InternetGateway"),
        "GatewayAttachment": {
            "Type": "AWS::EC2::VPCGatewayAttachment",
            "Properties": {"VpcId": vpc, "InternetGatewayId": {"Ref": "Gateway"}},
        },
        "PublicSubnet": made(
            "Subnet", VpcId=vpc, CidrBlock=PUBLIC_CIDR, AvailabilityZone={"Ref": "Zone"}
        ),
        "PrivateSubnet": made(
            "Subnet", VpcId=vpc, CidrBlock=PRIVATE_CIDR, AvailabilityZone={"Ref": "Zone"}
        ),
        "Address": {
            **made("EIP", Domain="vpc"),
            "DependsOn": "GatewayAttachment",
        },
        "Nat": made(
            "NatGateway",
            AllocationId={"Fn::GetAtt": ["Address", "AllocationId"]},
            SubnetId={"Ref": "PublicSubnet"},
        ),
        "PublicTable": made("RouteTable", VpcId=vpc),
        "PrivateTable": made("RouteTable", VpcId=vpc),
        "PublicRoute": {
            **route("PublicTable", GatewayId={"Ref": "Gateway"}),
            "DependsOn": "GatewayAttachment",
        },
        "PrivateRoute": route("PrivateTable", NatGatewayId={"Ref": "Nat"}),
        "PublicAssociation": associated("PublicSubnet", "PublicTable"),
        "PrivateAssociation": associated("PrivateSubnet", "PrivateTable"),
        "S3": {
            "Type": "AWS::EC2::VPCEndpoint",
            "Properties": {
                "VpcId": vpc,
                "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
                "VpcEndpointType": "Gateway",
                "RouteTableIds": [{"Ref": "PrivateTable"}],
            },
        },
    }
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Network of {given.name}",
        "Parameters": {"Zone": {"Type": "AWS::EC2::AvailabilityZone::Name"}},
        "Resources": resources,
        "Outputs": {
            "VPC": {"Value": vpc},
            "SubnetsPrivate": {"Value": {"Ref": "PrivateSubnet"}},
            "SubnetsPublic": {"Value": {"Ref": "PublicSubnet"}},
        },
    }
