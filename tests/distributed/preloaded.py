"""What the server of all test processes imports before it forks, so that no rank has to.

Imported by that server alone; it starts no thread, no process group and no device.
"""

import gc
import importlib

for _name in (
    "numpy.ma",
    "torch._dynamo",  # the first optimizer step imports it
    "torch.distributed.checkpoint.hf_storage",
    "torch.profiler",
    "transformers.generation",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "shardyard.train.run",
    "tests.distributed.ranks",
):
    importlib.import_module(_name)

# What was imported never becomes garbage. A rank that looks through it all the same takes a third
# of a second each time, and copies every page that it shares with the others.
gc.collect()
gc.freeze()
