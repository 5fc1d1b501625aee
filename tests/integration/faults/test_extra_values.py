"""Values in `extra` that have no state_dict(): a recovery is exact, and a bad one is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rekindle.testing.runs import Run

StartRun = Callable[..., Run]

SCRIPT = """
import collections, enum, os, random, signal, sys
from pathlib import Path
from typing import NamedTuple
import numpy as np, torch
from rekindle.training.torch import Session

class Mode(enum.Enum):
    WARM = "warm"
    FULL = "full"

class Seen(NamedTuple):
    step: int
    value: torch.Tensor

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
noise, draws = torch.Generator().manual_seed(1), np.random.default_rng(1)
legacy, python = np.random.RandomState(1), random.Random(1)
window, totals = collections.deque(maxlen=3), np.zeros(3)
counts = collections.defaultdict(list)
wide = torch.zeros(2, dtype=torch.complex128)
state = {"mode": Mode.WARM, "done": set(), "where": Path("a"), "wide": wide, "last": [0.0] * 4}
done = state["done"]  # a reference that the script keeps
extra = {
    "noise": noise, "draws": draws, "legacy": legacy, "python": python, "window": window,
    "totals": totals, "counts": counts, "state": state,
}
first = os.environ["MA_PROC_START_CNT"] == "1"
with Session(model=model, optimizer=optimizer, ddp=True, extra=extra) as session:
    for step in session.steps(12):
        with step:
            kept = [sorted(done), totals.tolist(), str(state), dict(counts)]
            kept += [(each.step, each.value.tolist()) for each in window]
            step.log(kept=repr(kept))
            if first and session.rank == 1 and step.number == 7 and sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = session.model(torch.tensor([state["last"]])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            drawn = [torch.rand(1, generator=noise).item(), float(draws.random())]
            drawn += [legacy.normal(), python.gauss(0, 1)]
            window.append(Seen(step.number, torch.tensor(drawn)))
            done.add(step.number)
            counts[step.number % 2].append(drawn[0])
            totals[step.number % 3] += drawn[1]
            wide += complex(drawn[2], drawn[3])
            state["last"] = drawn
            state["mode"] = Mode.FULL if step.number > 4 else Mode.WARM
            state["where"] = state["where"] / str(step.number)
assert window.maxlen == 3 and done is state["done"] and wide is state["wide"]
"""

BAD = """
import torch
from rekindle.training.torch import Session

class Meter:
    value = 0

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bad = {"meters": [1, Meter()]}
Session(model=model, optimizer=optimizer, extra={"bad": bad})
print("trained", flush=True)
"""


def test_values_without_methods_are_exact(rekindle_run: StartRun, tmp_path: Path) -> None:
    """Generators, arrays, queues and Enums of a replaced rank go on as without a fault."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = {}
    for how in ("kill", "calm"):
        run = rekindle_run(str(script), how, nproc_per_node=2, snapshot_every=1)
        report = run.wait()
        assert report.succeeded, run.story()
        assert len(report.incidents) == (how == "kill")
        found[how] = [report.values("kept", rank) for rank in range(2)]
    assert found["kill"] == found["calm"]


def test_a_value_without_a_form_is_refused_at_once(rekindle_run: StartRun, tmp_path: Path) -> None:
    """The constructor refuses it, and names the place and what to do."""
    script = tmp_path / "train.py"
    script.write_text(BAD)
    run = rekindle_run(str(script), nproc_per_node=1)
    assert not run.wait().succeeded
    assert "bad.meters.1: a state cannot contain a value of type Meter; keep it out" in run.output
    assert "trained" not in run.output
