"""Kubernetes: one pod template; JobSet, TrainJob and PyTorchJob around it; the API server."""
