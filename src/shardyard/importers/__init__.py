"""What others wrote, taken over: their configurations (``configs/``).

Part of the control half: nothing here imports torch.
"""
