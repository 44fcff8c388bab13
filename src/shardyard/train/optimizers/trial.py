"""Trial steps of an optimizer of the user's own, on a matrix and a vector of a few numbers.

They show what it holds of a parameter, whether each element moves by itself (so that it may act on
shards), and whether its steps follow from states that a checkpoint holds. All ranks come to the
same answer, as all of them take the same steps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.own_code import OwnFunction, describe
from shardyard.train.optimizers.state_forms import Form, form_of, give, states_of

_LR = 0.1
_STEPS = 3
_ROWS, _COLUMNS = 8, 4
UPDATES = "updates"
"""State that Shardyard adds: how many steps a parameter has taken."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Findings of a trial."""

    forms: Mapping[bool, Mapping[str, Form]]
    """Forms of the states, of matrices (True) and of vectors (False)."""
    group_keys: tuple[str, ...]
    """Keys of its groups whose numbers change from step to step, without ``lr``."""
    is_elementwise: bool
    """Whether steps on parts of a parameter are the parts of a step on the whole."""

    @property
    def states(self) -> list[str]:
        """Names of the states that have the form of a matrix."""
        return [name for name, form in self.forms[True].items() if form.is_like_param]


@dataclass(frozen=True, kw_only=True)
class OwnKind:
    """An optimizer of the user's own, as it is made."""

    factory: OwnFunction
    settings: Mapping[str, Any]

    def make(self, params: Sequence[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
        """Make one of some parameters.

        Raises:
            RequestError: The user's code failed, or returned something else.
        """
        made = self.factory(list(params), lr=lr, **self.settings)
        if not isinstance(made, torch.optim.Optimizer):
            raise self.factory.returned(made)
        held = {id(each) for group in made.param_groups for each in group["params"]}
        left_out = sum(id(each) not in held for each in params)
        if left_out:
            raise self.problem(
                f"leaves {left_out} of {len(params)} parameters out. Put all in its groups, and "
                "freeze by model.frozen."
            )
        return made

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take one step.

        Raises:
            RequestError: The user's code failed.
        """
        factory = self.factory
        OwnFunction(
            setting=factory.setting, import_path=factory.import_path, function=optimizer.step,
            contract=factory.contract,
        )()  # fmt: skip

    def problem(self, text: str) -> RequestError:
        """The error of an optimizer that cannot be used."""
        return RequestError(
            f"{self.factory.setting}={self.factory.import_path} ({self.factory.location}) {text}"
        )


def try_out(kind: OwnKind, *, device: torch.device) -> Traits:
    """Take trial steps; random numbers that come later are those that would have come without it.

    Raises:
        RequestError: The optimizer fails, or its steps could not be repeated by a resume.
    """
    with torch.random.fork_rng(devices=[]):  # an optimizer that draws on the device is rejected
        return _try_out(kind, device)


def _try_out(kind: OwnKind, device: torch.device) -> Traits:
    trial = _Trial.of(kind, device)
    params = trial.copies()
    optimizer = kind.make(params, lr=_LR)
    if callable(getattr(optimizer, "eval", None)):
        raise kind.problem(
            "has a method eval(): it validates other weights than it trains, and Shardyard "
            "validates the trained ones. Use optim.name=schedule_free_adamw instead, or "
            "optim.ema_decay."
        )
    before = [dict(group) for group in optimizer.param_groups]
    trial.take(optimizer, params, range(_STEPS - 1))
    group_keys = _changed_keys(kind, before, optimizer.param_groups)
    states = [states_of(optimizer, each, group_keys) for each in params]
    forms = {
        param.dim() >= 2: _forms(kind, param, held)
        for param, held in zip(params, states, strict=True)
    }
    resumed = [nn.Parameter(each.detach().clone()) for each in params]
    restored = [{name: _copy(each) for name, each in held.items()} for held in states]
    trial.take(optimizer, params, range(_STEPS - 1, _STEPS))
    _check_resume(kind, trial, params, resumed, restored)
    return Traits(forms=forms, group_keys=group_keys, is_elementwise=trial.is_elementwise(params))


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A matrix, a vector, and their gradients."""

    kind: OwnKind
    weights: tuple[Tensor, ...]
    gradients: tuple[tuple[Tensor, ...], ...]
    """Gradients of each step, one for each weight."""

    @staticmethod
    def of(kind: OwnKind, device: torch.device) -> "_Trial":
        draw = torch.Generator().manual_seed(0)
        shapes = ((_ROWS, _COLUMNS), (_ROWS,))
        drawn = [
            tuple(torch.randn(shape, generator=draw).to(device) for shape in shapes)
            for _ in range(_STEPS + 1)
        ]
        return _Trial(kind=kind, weights=drawn[0], gradients=tuple(drawn[1:]))

    def copies(self) -> list[nn.Parameter]:
        return [nn.Parameter(each.clone()) for each in self.weights]

    def take(
        self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: range,
        *, cut: Any = slice(None), seed: int = 0,
    ) -> None:  # fmt: skip
        """Take some of the steps, with the same random numbers for the same seed."""
        for step in steps:
            torch.manual_seed(seed + step)
            for param, gradient in zip(params, self.gradients[step], strict=False):
                param.grad = gradient[cut].clone()
            self.kind.step(optimizer)

    def of_part(self, cut: Any, count: int = 2) -> Sequence[Tensor]:
        """Parts of the first ``count`` weights, after all steps on only these parts."""
        params = [nn.Parameter(each[cut].clone()) for each in self.weights[:count]]
        self.take(self.kind.make(params, lr=_LR), params, range(_STEPS), cut=cut)
        return params

    def is_elementwise(self, whole: Sequence[Tensor]) -> bool:
        """Whether steps on halves, by rows or by columns, move them as steps on the whole do."""
        half, columns = _ROWS // 2, _COLUMNS // 2
        rows = [self.of_part(slice(half)), self.of_part(slice(half, None))]
        by_rows = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        cuts = [(slice(None), slice(columns)), (slice(None), slice(columns, None))]
        by_columns = torch.cat([self.of_part(cut, 1)[0] for cut in cuts], dim=1)
        pairs = [*zip(whole, by_rows, strict=True), (whole[0], by_columns)]
        return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs)


def _changed_keys(
    kind: OwnKind, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Keys of groups whose values changed.

    Raises:
        RequestError: One of them is no number.
    """
    found = {
        key: value
        for old, new in zip(before, after, strict=True)
        for key, value in new.items()
        if key not in ("params", "lr") and not _same(old.get(key), value)
    }
    for key, value in found.items():
        if not isinstance(value, int | float):
            raise kind.problem(
                f"changes {key} of its groups, {describe(value)}, and a checkpoint holds only "
                "numbers of a group. Keep it in optimizer.state, by parameter."
            )
    return tuple(sorted(found))


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return old is new
    return bool(old == new)


def _forms(kind: OwnKind, param: Tensor, held: Mapping[str, Any]) -> dict[str, Form]:
    found = {}
    for name, value in held.items():
        form = form_of(value, param)
        if form is None or name == UPDATES or "." in name:
            raise kind.problem(
                f"holds the state {name}, {describe(value)}, of a parameter {tuple(param.shape)}. "
                "A checkpoint holds states that are numbers, or tensors in the shape of the "
                f"parameter, under names without dots other than {UPDATES}. Use another optimizer."
            )
        found[name] = form
    return found


def _check_resume(
    kind: OwnKind, trial: _Trial, params: Sequence[Tensor], resumed: list[nn.Parameter],
    states: Collection[Mapping[str, Any]],
) -> None:  # fmt: skip
    """Take the last step by another optimizer that has only the saved states."""
    optimizer = kind.make(resumed, lr=_LR)
    for param, held in zip(resumed, states, strict=True):
        give(optimizer, param, held)
    trial.take(optimizer, resumed, range(_STEPS - 1, _STEPS))
    if not _all_equal(params, resumed):
        raise kind.problem(
            "keeps a state outside of optimizer.state and its groups: in a trial, a step after a "
            "resume was not the step without one. Keep it in self.state[param]."
        )
    again = trial.copies()
    trial.take(kind.make(again, lr=_LR), again, range(_STEPS), seed=1000)
    if not _all_equal(params, again):
        raise kind.problem(
            "draws random numbers: in a trial, the same steps gave other weights, so no resume "
            "would be exact. Draw them from a generator that is seeded by a step in self.state."
        )


def _all_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
