"""Four learning rates, two runs at a time on this machine; the best is printed.

    python examples/python/sweep.py [section.key=value ...]

Hardware and price are those of examples/quickstart.yaml, each run with one process.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import shardyard

RECIPE = (Path(__file__).parents[1] / "quickstart.yaml", "cluster.devices=1", *sys.argv[1:])
RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def held_out_loss(lr: float) -> float:
    """Loss on held-out text after a run with this learning rate."""
    job = shardyard.launch(*RECIPE, f"optim.lr={lr}", on="local")
    return job.result().summary.eval_loss


with ThreadPoolExecutor(max_workers=2) as workers:
    losses = dict(zip(RATES, workers.map(held_out_loss, RATES), strict=True))
for lr, loss in losses.items():
    print(f"lr {lr:g}: {loss:.3f} nats a token")
print(f"the best learning rate is {min(losses, key=losses.get):g}")
