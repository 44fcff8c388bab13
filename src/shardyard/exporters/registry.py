"""The services, by name."""

from importlib import import_module

from shardyard.exporters.service import Service

SERVICES = {
    "wandb": "shardyard.exporters.wandb:Wandb",
    "mlflow": "shardyard.exporters.mlflow:Mlflow",
}


def service_named(name: str) -> Service:
    """A service; its client is imported when it is opened."""
    module, _, kind = SERVICES[name].partition(":")
    found: Service = getattr(import_module(module), kind)()
    return found
