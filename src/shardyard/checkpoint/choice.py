"""Which checkpoint ``--step`` means, every file of it held to its manifest."""

from shardyard.checkpoint.load import Chosen, find_sound
from shardyard.checkpoint.retention import complete_steps, pointer_problem, read_pointer
from shardyard.checkpoint.verify import verify_manifest
from shardyard.errors import CheckpointError, RequestError
from shardyard.rundir.layout import RunDir


def choose_checkpoint(run_dir: RunDir, step: str) -> Chosen:
    """The checkpoint that ``--step`` means, verified.

    Args:
        step: A number, ``best``, or ``latest``: the newest sound one.

    Raises:
        RequestError: There is none.
        CheckpointError: It is damaged; for ``latest``: all are.
    """
    steps = complete_steps(run_dir.checkpoints)
    if not steps:
        raise RequestError(
            f"run {run_dir.run_id} has no checkpoint yet: {run_dir.checkpoints} holds none. One is "
            "written every checkpoint.every steps and at the end; wait, or resume the run."
        )
    if step == "latest":
        chosen = find_sound(run_dir.checkpoints)
        assert chosen is not None, steps
        return chosen
    number = read_pointer(run_dir.checkpoints, "best") if step == "best" else _number(step)
    if step == "best" and number is None and (why := pointer_problem(run_dir.checkpoints, "best")):
        raise RequestError(
            f"--step best: {why}. There are checkpoints of steps {', '.join(map(str, steps))}: "
            "give one of them, or latest."
        )
    if number not in steps:
        raise RequestError(
            f"--step {step}: run {run_dir.run_id} has no such checkpoint. It has those of steps "
            f"{', '.join(map(str, steps))}. Give one of them, latest, or best (named after an "
            "evaluation)."
        )
    path = run_dir.checkpoint(number)
    damage = verify_manifest(path)
    if damage:
        raise CheckpointError(
            f"{path} is damaged: {'; '.join(map(str, damage))}. Its weights cannot be trusted. "
            "Use --step latest for the newest sound checkpoint."
        )
    return Chosen(number, path, ())


def _number(step: str) -> int | None:
    return int(step) if step.isdecimal() else None
