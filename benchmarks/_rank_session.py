"""A rank that trains through Rekindle's Session. Arguments: folder, size, steps.

An injected exception is a RuntimeError, which this script declares as transient.
"""

# ruff: noqa: E402

import os
import sys

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")  # before torch is imported

from _task import BATCH_SIZE, Task

from rekindle.training.torch import Session, StepSampler


class Watch:
    """An empty state that writes an event when this rank's state is read, and when it is loaded."""

    def state_dict(self) -> dict[str, object]:
        progress.tell("read")
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        progress.tell("taken")


def main() -> None:
    task = Task(sys.argv[2])
    sampler = StepSampler(len(task.windows), BATCH_SIZE)
    progress.tell("ready")
    with Session(
        model=task.model,
        optimizer=task.optimizer,
        sampler=sampler,
        ddp=True,
        extra={**task.beside, "watch": Watch()},
        transient=(RuntimeError,),
    ) as session:
        for step in session.steps(int(sys.argv[3])):
            progress.pace()
            with step:
                progress.tell("begin", step.number, session.generation)
                loss = task.forward(session.model, step.indices)
                step.log(loss=loss)
                task.update(loss)
            event = "step" if session.finished > step.number else "left"
            progress.tell(event, session.finished, session.generation)


if __name__ == "__main__":
    main()
