"""The file system of the metrics hangs: training continues, and no step record is lost."""

from __future__ import annotations

from hanging import HangingFile
from jobs import Place
from process_faults.playing import Gates
from process_faults.started import CommandJob, digests, rank_process, undisturbed_digests

from rekindle import names


def test_training_continues_while_the_metrics_hang(place: Place) -> None:
    """A rank trains on, and a recovery works, while the file of its step records takes no data.

    The file has each record when it takes data again.
    """
    expected = undisturbed_digests(place.folder / "undisturbed")
    gates = Gates(place.folder)
    gates.close("start", "late", "end")
    job = CommandJob(place).start()
    run = job.run
    run.wait_until(lambda: gates.reached("start"), "all ranks at their start")
    file = HangingFile(run.directory.path / names.METRICS_DIRECTORY / "rank0.jsonl")
    file.fill()
    gates.open("start")
    run.wait_until(lambda: gates.reached("late"), "the last steps")
    rank_process(place.folder, 0).kill()
    gates.open("late")
    run.wait_until(lambda: gates.reached("end"), "the end of all steps")
    run.wait_until(lambda: '"step":39' in file.read(), "the record of the last step")
    gates.open("end")
    job.end()
    assert digests(place.folder) == expected
    (incident,) = run.incidents()
    assert (incident.closed, incident.steps_lost) == (True, 0)
    file.close()
