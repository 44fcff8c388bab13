"""Find routers of a mixture of experts that have collapsed: one expert gets almost all tokens."""

STEPS_IN_ROW = 3
NEAR_MOST = 0.9
"""Share of the way from an even load (1) to the largest possible one."""
_USUAL_LOSS = 0.01


class RouterWatch:
    """Reads the expert load of each step."""

    def __init__(self, *, experts: int, experts_per_token: int, router_aux_loss: float) -> None:
        """Args:
        experts: Experts of a block; 0: it has none, and no problem is found.
        experts_per_token: Experts that a token visits.
        router_aux_loss: Value in the recipe.
        """
        self._experts, self._experts_per_token = experts, experts_per_token
        self._loss = router_aux_loss
        self._steps = 0
        self._is_reported = False

    def after_step(self, step: int, load: float | None) -> str | None:
        """Return the problem and its remedy, once a process; else None.

        Args:
            load: Visits of the busiest expert of any block, as a multiple of the mean.
        """
        if load is None or not self._experts or self._experts <= self._experts_per_token:
            return None
        # A token visits an expert once at most, so the busiest has at most one visit of each token.
        most = self._experts / self._experts_per_token  # each token visits it
        has_collapsed = load >= 1 + NEAR_MOST * (most - 1)
        self._steps = self._steps + 1 if has_collapsed else 0
        if self._steps < STEPS_IN_ROW or self._is_reported:
            return None
        self._is_reported = True
        loss = max(_USUAL_LOSS, 10 * self._loss)
        return (
            f"A router has collapsed: since step {step + 1 - STEPS_IN_ROW:,} one expert "
            f"of a block gets {load / most:.0%} of all tokens (expert_load {load:.2f}; 1 is even, "
            f"{most:.2f} the most for {self._experts} experts of which a token visits "
            f"{self._experts_per_token}), so others learn next to nothing. The likely fix: "
            f"model.router_aux_loss={loss:g} in place of {self._loss:g}."
        )
