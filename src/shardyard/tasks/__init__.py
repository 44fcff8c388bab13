"""What can be learnt: each task turns a micro-batch into a loss. Names are those of `task.name`."""

from shardyard.tasks.causal_lm import CausalLM

TASKS = {"causal_lm": CausalLM}
