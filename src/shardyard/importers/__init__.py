"""What others wrote, taken over: their configurations (``configs/``) and their checkpoints.

Part of the control half: nothing here imports torch.
"""
