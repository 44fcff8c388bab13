"""The services, by name."""

from importlib import import_module

from shardyard.trackers.service import Service

SERVICES = {
    "wandb": "shardyard.trackers.wandb:Wandb",
    "mlflow": "shardyard.trackers.mlflow:Mlflow",
}


def service_named(name: str) -> Service:
    """A service; its client is imported when it is opened."""
    module, _, kind = SERVICES[name].partition(":")
    found: Service = getattr(import_module(module), kind)()
    return found
