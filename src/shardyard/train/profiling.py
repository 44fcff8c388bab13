"""What the loop asks of profiles; ``train/profile.py`` takes them, this one takes none."""

from contextlib import AbstractContextManager, nullcontext


class Profiling:
    """All profiles of one training. Every rank calls it at the same steps."""

    @property
    def is_wanted(self) -> bool:
        """This rank's wish, which the next step carries to all."""
        return False

    @property
    def is_open(self) -> bool:
        """Whether the step under way is profiled; the same on all ranks."""
        return False

    def looking(self) -> AbstractContextManager[None]:
        """Look for requests while it is open; a profile under way at its end is lost."""
        return nullcontext()

    def before_step(self, step: int, *, is_wanted: bool) -> float:  # noqa: ARG002
        """Begin a profile, if one is due.

        Args:
            is_wanted: What all ranks have heard in the result of a step.

        Returns:
            Seconds that belong to no step.
        """
        return 0.0

    def apart(self) -> AbstractContextManager[object]:
        """While it is open, what is done is no part of a step."""
        return nullcontext()

    def saw_step(self, step_time_s: float) -> None:
        """A step took so long."""

    def after_step(self) -> float:
        """Count a step, and end a profile that has all of its own; returns as ``before_step``."""
        return 0.0

    def end(self, *, is_draining: bool, is_last: bool) -> None:
        """No further step of this training comes.

        Args:
            is_draining: What time there is, is for saving.
            is_last: No other phase of the run takes up what is asked for.
        """


NO_PROFILES = Profiling()
