"""Plan a run, launch it on this machine, wait, and read what came of it.

    python examples/python/launch.py [section.key=value ...]

Hardware, time, price and result are those of examples/quickstart.yaml.
"""

import sys
from pathlib import Path

import shardyard

recipe = (Path(__file__).parents[1] / "quickstart.yaml", *sys.argv[1:])
print(shardyard.plan(*recipe).plan.line())
job = shardyard.launch(*recipe, on="local")
print(f"launched {job.run_id}: {job.state()}")
result = job.result()
print(f"loss of the first step {job.metrics()[0]['loss']:.3f}, of held-out text", result.evaluation)
print(f"weights: {result.checkpoint}\nopen this page: {result.report}")
