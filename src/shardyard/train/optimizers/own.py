"""The step of an optimizer of the user's own (``optim.module``), over the shards of this rank."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardyard.config.rules.own_code import OPTIMIZER
from shardyard.config.schema.recipe import Optim
from shardyard.own_code import describe, load_own
from shardyard.parallel.gradients import ParamNorms
from shardyard.torch_private import foreach_div_
from shardyard.train.optimizers import State, gradients
from shardyard.train.optimizers.state_forms import form_of, give, states_of
from shardyard.train.optimizers.trial import UPDATES, OwnKind, Traits, try_out


class OwnOptimizer:
    """Gives the user's optimizer divided gradients, the learning rate and its states.

    Unlike the built-in ones, it waits for the device once a step: whether a step is skipped is
    decided there, and the user's code does not know it.
    """

    most_elements = math.inf

    def __init__(self, shards: Mapping[str, nn.Parameter], optim: Optim, norms: ParamNorms) -> None:
        """Try the optimizer on a few numbers.

        Raises:
            RequestError: It cannot be used, or not in this layout.
        """
        assert optim.module is not None
        self._shards = shards
        self._lr = self._peak = float(optim.lr)
        factory = load_own("optim.module", optim.module, OPTIMIZER)
        self._kind = OwnKind(factory=factory, settings=optim.module_settings)
        device = next((each.device for each in shards.values()), torch.device("cpu"))
        self._traits = try_out(self._kind, device=device)
        self._check(self._traits, optim, is_split=norms.is_split)
        self.states: dict[str, State] = {
            name: {
                **{key: form.zeros(shard) for key, form in self._forms(shard).items()},
                UPDATES: torch.zeros((), dtype=torch.float64),
            }
            for name, shard in shards.items()
        }
        self._optimizer: torch.optim.Optimizer | None = None
        self._rates: list[float] = []
        self._given: set[str] = set()

    def begin(
        self, *, lr: float, divisor: Tensor, skip: Tensor, grads: Mapping[str, Tensor]
    ) -> None:
        """A step begins."""
        del grads  # each comes with its shard
        self._lr, self._divisor, self._skip = lr, divisor.float(), skip

    def update(self, names: Sequence[str], states: Mapping[str, State]) -> None:
        """Take all shards; the optimizer's states are not those that the others are given."""
        del states
        moving = [name for name in names if self._shards[name].grad is not None]
        if moving and not bool(self._skip):
            foreach_div_(gradients(self._shards, moving), self._divisor)
            self._step(moving)
        for name in names:
            self._shards[name].grad = None

    def finish(self) -> None:
        """All shards were finished when they were given."""

    def _step(self, moving: Sequence[str]) -> None:
        optimizer = self._opened()
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = self._lr * rate
        for name in moving:
            # Once only: from then on the optimizer holds its states itself.
            if name not in self._given and self.states[name][UPDATES]:
                shard, saved = self._shards[name], self.states[name]
                restored = {
                    key: form.restored(saved[key]) for key, form in self._forms(shard).items()
                }
                give(optimizer, shard, restored)
        self._kind.step(optimizer)
        for name in moving:
            self._keep(optimizer, name)
        self._given.update(moving)

    def _opened(self) -> torch.optim.Optimizer:
        """The user's optimizer, made at the first step: only then the weights have their values."""
        if self._optimizer is None:
            # Groups with a rate of their own keep its ratio to optim.lr.
            self._optimizer = self._kind.make(list(self._shards.values()), lr=self._peak)
            self._rates = [
                float(each.get("lr", self._peak)) / self._peak
                for each in self._optimizer.param_groups
            ]
        return self._optimizer

    def _keep(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Put the states that a step left into the tensors that are saved."""
        shard, saved = self._shards[name], self.states[name]
        forms, held = self._forms(shard), states_of(optimizer, shard, self._traits.group_keys)
        if held.keys() != forms.keys():
            raise self._other_states(name, held)
        for key, value in held.items():
            found = form_of(value, shard)
            if found is None or found.is_like_param != forms[key].is_like_param:
                raise self._other_states(name, held)
            if value is saved[key]:
                continue
            if isinstance(value, Tensor):
                saved[key].copy_(value.detach().reshape(saved[key].shape))
            else:
                saved[key].fill_(value)
            if forms[key].is_like_param:
                optimizer.state[shard][key] = saved[key]
        saved[UPDATES] += 1

    def _forms(self, shard: Tensor) -> Mapping[str, Any]:
        return self._traits.forms[shard.dim() >= 2]

    def _other_states(self, name: str, held: Mapping[str, Any]) -> Exception:
        forms = ", ".join(self._forms(self._shards[name])) or "none"
        return self._kind.problem(
            f"holds {describe(held)} of {name}, and in a trial on a small parameter it held "
            f"{forms}. Let it hold the same states of every parameter of as many dimensions."
        )

    def _check(self, traits: Traits, optim: Optim, *, is_split: bool) -> None:
        declared = list(optim.module_states)
        if declared and sorted(declared) != sorted(traits.states):
            raise self._kind.problem(
                f"holds the states {', '.join(traits.states) or 'none'} of a matrix, and "
                f"optim.module_states names {', '.join(declared)}. Set optim.module_states="
                f"[{', '.join(traits.states)}]."
            )
        if is_split and not traits.is_elementwise:
            raise self._kind.problem(
                "needs whole parameters: in a trial, its steps on the halves of a matrix were not "
                "those on the whole, and in this layout a rank holds parts. Use "
                "parallel.dp_shard=1 with dp_replicate, and tp=1, pp=1, ep=1."
            )
