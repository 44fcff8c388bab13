"""Importers for the configurations of other programs (``configs/``).

Part of the control half: no module here imports torch.
"""
