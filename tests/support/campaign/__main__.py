"""Replay trials: `PYTHONPATH=tests/support python -m campaign --seed N [--count M]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from suite.calibration import calibrate
from suite.environment import clean

from campaign.expectations import expected
from campaign.running import run_trial
from campaign.shared import SharedParts
from campaign.trials import trial_of


def main() -> int:
    """Run trials one after the other; return 1 if one did not end as expected."""
    parser = argparse.ArgumentParser(prog="campaign")
    parser.add_argument("--seed", type=int, required=True, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    parser.add_argument("--step", type=int, default=1, help="distance of the seeds")
    parser.add_argument("--list", action="store_true", help="print the trials, and run none")
    parser.add_argument("--flows", choices=("with", "without", "only"), default="with")
    parser.add_argument("--stories", type=Path, help="write journals and logs here")
    options = parser.parse_args()
    seeds: Sequence[int] = range(
        options.seed, options.seed + options.count * options.step, options.step
    )
    if options.flows != "with":
        seeds = [s for s in seeds if trial_of(s).kind.flow is (options.flows == "only")]
    failed = []
    calibrate()
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        clean(name)
        with SharedParts(Path(name)) as shared:
            for seed in seeds:
                trial = trial_of(seed)
                print(f"{trial}\n{expected(trial)}", flush=True)
                if options.list:
                    continue
                result = run_trial(trial, Path(name) / f"trial-{seed}", shared)
                print(result, flush=True)
                if options.stories and result.story:
                    Path(options.stories, f"trial-{seed}.txt").write_text(result.story)
                elif result.story:
                    print(result.story, flush=True)
                failed += [seed] * bool(result.problems)
    print(f"{len(seeds)} trials, {len(failed)} not as expected: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
