"""What can be learnt: each task turns a micro-batch into a loss. Names are those of `task.name`."""

from shardyard.tasks.causal_lm import CausalLM
from shardyard.tasks.masked_lm import MaskedLM

TASKS = {"causal_lm": CausalLM, "masked_lm": MaskedLM}
