"""Stop a training with SIGTERM, once or twice, at any moment of a save too (T10)."""

from __future__ import annotations

import signal
import time

from tiny_training import committed
from training_round import PATIENCE_SECONDS, Training


def stop(training: Training, grace_seconds: float) -> None:
    """Start, signal, and look at what is left; or see the training come to its end before.

    Within the grace period the process must end by itself, and with a checkpoint of its very last
    batch: `training` then sees to it that the next start runs none again.

    Raises:
        LossError: it did not.
    """
    chance, outcome = training.chance, training.outcome
    in_write = chance.random() < 0.5
    # The child goes on while the signal is on its way: nothing here may be held up.
    point = ("write", chance.randrange(150), False) if in_write else None
    wanted, num_wanted = ("at ", 1) if in_write else ("batch", chance.randrange(1, 50))
    child = training.start(point)
    while num_wanted and (line := child.next_line(PATIENCE_SECONDS)) is not None:
        num_wanted -= line.startswith(wanted)
    time.sleep(chance.uniform(0.0, 0.005))
    unfinished, begin = training.unfinished(), time.monotonic()
    group, twice = chance.random() < 0.5, chance.random() < 0.3
    child.kill(group=group, number=signal.SIGTERM)
    if twice:
        time.sleep(chance.uniform(0.0, 0.05))
        child.kill(group=group, number=signal.SIGTERM)
    code = child.wait(grace_seconds)
    seconds = time.monotonic() - begin
    training.account(child)
    told = any(line.startswith("interrupted") for line in child.lines)
    child.bury()
    if training.done is not None:
        return
    if code != 0 or not told:
        raise training.fail(f"SIGTERM: no interruption within {seconds:.1f} s, exit code {code}")
    # An earlier start may have come further before it was killed; this one has to save its own.
    step = committed(training.folder)
    if step != training.last_step:
        raise training.fail(f"SIGTERM: step {step} saved, {training.last_step} was the last batch")
    training.done_batches, training.stopped = step, True
    outcome.signals += 1
    outcome.signals_in_a_write += unfinished
    outcome.double_signals += twice
    outcome.slowest_stop_seconds = max(outcome.slowest_stop_seconds, round(seconds, 2))
