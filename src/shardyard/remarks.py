"""Remarks of libraries on themselves, kept out of what a user reads.

torchao says at its import which of its kernels this machine cannot load, and torch complains of how
torchao registers its types. Neither is about what the user asked for.
"""

import logging

for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)
