"""ModelArts' "fault recovery of training jobs": annotations, faults, and what becomes of the job.

Each job has simulated hosts and a script without a Session, as ModelArts runs it. Several jobs have
many faults. `tests/support/specification/document_004.py` has the sentences that these tests prove.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import acts
import pytest
import yaml
from driver_doubles import driver, on_the_first_node
from jobs import Place
from specification.platform_job import PlatformJob, described, shell

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

JOB_RETRY = "fault-tolerance/job-retry-num"
UNCONDITIONAL = "fault-tolerance/job-unconditional-retry"
HANG_RETRY = "fault-tolerance/hang-retry"
POD_RETRY = "fault-tolerance/pod-retry-num"
EXAMPLE = {JOB_RETRY: "8", UNCONDITIONAL: "true", HANG_RETRY: "true", POD_RETRY: "3"}

HBM = "80E01801"  # HBM multi-bit ECC
CHIP, OTHER_CHIP = "80C78008", "80E18005"  # faults that a reset heals
USER = "80C98002"  # a fault that the user's input causes
SECOND_SUCCEEDS = """
import os, time

while os.environ["MA_PROC_START_CNT"] == "1":
    time.sleep(0.05)
"""
RESTART, POD = Strategy.RESTART, Strategy.RESCHEDULE_POD
ISOLATED, JOB = Strategy.RESCHEDULE_JOB_ISOLATED, Strategy.RESCHEDULE_JOB


def play(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Callable[[PlatformJob], None]],
    annotations: dict[str, str],
) -> Iterator[acts.Played]:
    """Run one job with all its acts."""
    with Place(tmp_path_factory.mktemp("platform") / "place") as place:
        yield acts.Played(steps, PlatformJob(place, annotations))


# ---- the example of the document: all annotations


def a_new_job_counts_from_one(job: PlatformJob) -> None:
    """Both variables of a new job are 1."""
    job.wait_starts((1, 1), (1, 1))


def a_memory_error_restarts_in_place(job: PlatformJob) -> None:
    """HBM multi-bit ECC: all processes end and start again in the same pods."""
    before = job.wait_starts((1, 1), (1, 1))
    job.report(HBM)
    after = job.wait_starts((1, 2), (1, 2))
    job.report(HBM, "--gone")
    assert [each.agent for each in after] == [each.agent for each in before]
    assert not {each.pid for each in after} & {each.pid for each in before}
    assert job.strategies() == [RESTART]


def another_code_of_a_chip_restarts_in_place(job: PlatformJob) -> None:
    """A code that a reset heals restarts all ranks, also the second time. No host is isolated."""
    for started in (3, 4):
        job.report(CHIP)
        job.wait_starts((1, started), (1, started))
    assert job.strategies() == [RESTART] * 3
    assert job.isolated() == []


def the_third_time_isolates_the_node(job: PlatformJob) -> None:
    """The third time of one code isolates the host, and only the pod of that node is placed."""
    before = job.starts()[-1]
    sick = job.hosts(1)[-1]
    job.report(CHIP)
    healthy, moved = job.wait_starts((1, 5), (2, 1))
    assert job.strategies()[3:] == [POD]
    assert job.isolated() == [sick]
    assert sick not in job.hosts(1)[1:]
    assert len(job.hosts(0)) == 1
    assert moved.agent != before.agent
    assert healthy.agent in {each.agent for each in job.starts()[:2]}


def a_notice_needs_nothing(job: PlatformJob) -> None:
    """A code with the severity of a notice starts no process; the next act counts them."""
    job.report("80FF0001", "--severity", "notice")
    job.run.wait_event(journal.HealthEventSeen, count=1)
    assert job.strategies()[4:] == []


def minor_and_major_faults_heal(job: PlatformJob) -> None:
    """Codes with these severities restart all ranks in their pods."""
    for started, severity in enumerate(("minor", "major"), 2):
        job.report(f"80FF000{started}", "--severity", severity)
        job.wait_starts((1, started + 4), (2, started))
    assert job.strategies()[4:] == [RESTART] * 2


def a_critical_fault_cannot_heal(job: PlatformJob) -> None:
    """A code with this severity isolates the host at once."""
    sick = job.hosts(1)[-1]
    job.report("80FF0009", "--severity", "critical")
    job.wait_starts((1, 8), (3, 1))
    assert job.strategies()[6:] == [POD]
    assert job.isolated()[1:] == [sick]


def what_the_user_causes_isolates_nothing(job: PlatformJob) -> None:
    """The third time of such a code places the whole job again, and no host is isolated."""
    for started in (2, 3):
        job.report(USER)
        job.wait_starts((1, 7 + started), (3, started))
        job.report(USER, "--gone")
    job.report(USER)
    job.wait_starts((2, 1), (4, 1))
    assert job.strategies()[7:] == [RESTART, RESTART, JOB]
    reason = job.run.events_of(journal.Decided)[-1].reason
    assert "check the data, the operators and the version of CANN" in reason
    assert len(job.isolated()) == 2


def a_script_that_fails_is_placed_again(job: PlatformJob) -> None:
    """An exit status other than 0 ends all pods, and the whole job starts in new ones."""
    before = {each.agent for each in job.wait_starts((2, 1), (4, 1))}
    job.fail(0)
    after = {each.agent for each in job.wait_starts((3, 1), (5, 1))}
    assert job.strategies()[10:] == [JOB]
    assert not before & after
    assert len(job.isolated()) == 2


def a_lost_node_places_only_its_pod(job: PlatformJob) -> None:
    """The host of a lost node is isolated, and the other node keeps its pod."""
    before = job.wait_starts((3, 1), (5, 1))
    lost = job.hosts(1)[-1]
    job.set_host(broken=True)
    after = job.wait_starts((3, 2), (6, 1))
    assert job.strategies()[11:] == [POD]
    assert job.isolated()[2:] == [lost]
    assert after[0].agent == before[0].agent
    assert job.hosts(1)[-1] not in job.isolated()


def after_the_last_pod_the_whole_job_is_placed(job: PlatformJob) -> None:
    """The number of pods is used up, so the next lost node places the whole job without its host.

    Then the job ends with success.
    """
    lost = job.hosts(1)[-1]
    job.set_host(broken=True)
    job.wait_starts((4, 1), (7, 1))
    assert job.strategies()[12:] == [ISOLATED]
    assert job.isolated()[3:] == [lost]
    job.succeed()
    assert lost not in (job.hosts(0)[-1], job.hosts(1)[-1])


EXAMPLE_ACTS = [
    a_new_job_counts_from_one,
    a_memory_error_restarts_in_place,
    another_code_of_a_chip_restarts_in_place,
    the_third_time_isolates_the_node,
    a_notice_needs_nothing,
    minor_and_major_faults_heal,
    a_critical_fault_cannot_heal,
    what_the_user_causes_isolates_nothing,
    a_script_that_fails_is_placed_again,
    a_lost_node_places_only_its_pod,
    after_the_last_pod_the_whole_job_is_placed,
]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run the job that has all annotations."""
    yield from play(tmp_path_factory, EXAMPLE_ACTS, EXAMPLE)


@pytest.mark.parametrize("act", acts.names(EXAMPLE_ACTS))
def test_the_example(example: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    example.check(act)


# ---- automatic restarts only


def restarts_in_place_use_up_nothing(job: PlatformJob) -> None:
    """More restarts in place than `job-retry-num`, by several codes."""
    job.wait_starts((1, 1), (1, 1))
    for started, code in enumerate((OTHER_CHIP, CHIP), 2):
        job.report(code)
        job.wait_starts((1, started), (1, started))
    assert job.strategies() == [RESTART] * 2


def a_chip_that_does_not_heal_isolates_its_node(job: PlatformJob) -> None:
    """A reset that fails isolates the host, and the whole job is placed again."""
    sick = job.hosts(1)[-1]
    job.set_host(sick_devices=(0,))
    job.report(OTHER_CHIP)
    job.wait_starts((2, 1), (2, 1))
    assert job.strategies()[2:] == [RESTART, ISOLATED]
    assert job.isolated() == [sick]
    assert sick not in (job.hosts(0)[-1], job.hosts(1)[-1])


def at_the_limit_the_job_fails(job: PlatformJob) -> None:
    """The next node's fault finds that `job-retry-num` is used up."""
    job.set_host(broken=True)
    job.run.end(1)
    assert job.strategies()[4:] == [Strategy.FAIL]
    assert "1 of 1 reschedules are used" in job.run.events_of(journal.Decided)[-1].reason


LIMITED_ACTS = [
    restarts_in_place_use_up_nothing,
    a_chip_that_does_not_heal_isolates_its_node,
    at_the_limit_the_job_fails,
]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run the job that may restart once."""
    yield from play(tmp_path_factory, LIMITED_ACTS, {JOB_RETRY: "1"})


@pytest.mark.parametrize("act", acts.names(LIMITED_ACTS))
def test_automatic_restart(limited: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    limited.check(act)


# ---- other combinations


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a folder with its own home; at the end no process may remain."""
    with Place(tmp_path_factory.mktemp("job") / "place") as found:
        yield found


def test_the_fourth_failure_in_succession_ends_the_job(place: Place) -> None:
    """Three failures of the script place the whole job again, and the fourth one fails it."""
    job = PlatformJob(place, {JOB_RETRY: "8", UNCONDITIONAL: "true"})
    for placed in range(1, 5):
        job.wait_starts((placed, 1), (placed, 1))
        job.fail(1)
    job.run.end(1)
    assert job.strategies() == [JOB] * 3 + [Strategy.FAIL]
    assert "the script is the likely cause" in job.run.events_of(journal.Decided)[-1].reason
    assert job.run.events_of(journal.Ended)[-1].outcome == "failed"


def test_a_failure_alone_places_no_job(place: Place) -> None:
    """Without `job-unconditional-retry` an exit status other than 0 fails the job."""
    job = PlatformJob(place, {JOB_RETRY: "8"})
    job.wait_starts((1, 1), (1, 1))
    job.fail(1)
    job.run.end(1)
    assert job.strategies() == [Strategy.FAIL]
    assert "no node or device is the cause" in job.run.events_of(journal.Decided)[-1].reason


def test_a_fault_that_stays_after_the_restart_isolates_its_node(place: Place) -> None:
    """The driver still reports the code after the restart in place: the fault was not healed."""
    folder = place.folder / "driver"
    env = driver(folder, HBM, sick=on_the_first_node(folder))
    job = PlatformJob(place, {JOB_RETRY: "1"}, env=env)
    job.wait_starts((2, 1), (2, 1))
    assert job.strategies() == [RESTART, ISOLATED]
    (sick,) = job.isolated()
    assert sick not in (job.hosts(0)[-1], job.hosts(1)[-1])
    assert "it was not healed" in job.run.events_of(journal.Decided)[-1].reason
    assert {each.started for each in job.starts() if each.placed == 1} == {1, 2}
    job.succeed()


def test_the_annotations_alone_allow_a_reset(place: Place) -> None:
    """The agent of a real host resets the chip of a job whose only policy is the annotation."""
    folder = place.folder / "driver"
    sick, reset = f"[ ! -e {folder}/done ]", f"touch {folder}/done"
    env = place.environment(driver(folder, OTHER_CHIP, sick=sick, reset=reset))
    (place.folder / "job.yaml").write_text(described({JOB_RETRY: "1"}))
    run = place.start_quick(place.script(SECOND_SUCCEEDS), "--policy", "job.yaml", env=env)
    run.end(0)
    assert [event.strategy for event in run.events_of(journal.Decided)] == [RESTART]
    assert run.events_of(journal.ResetSkipped) == []
    assert "set -t reset -i 0 -c 0" in (folder / "calls").read_text().splitlines()


def test_a_hang_with_a_hardware_fault_is_that_fault(place: Place) -> None:
    """The code of the chip of a job that hangs leads to the recovery in place, with its reset."""
    job = PlatformJob(place, {JOB_RETRY: "1", HANG_RETRY: "true"})
    job.wait_starts((1, 1), (1, 1))
    job.hang()
    job.report(OTHER_CHIP)
    (job.place.folder / "hang").unlink()
    job.wait_starts((1, 2), (1, 2))
    assert job.strategies() == [RESTART]
    assert job.run.events_of(journal.Decided)[0].fault.code == OTHER_CHIP
    job.succeed()


@pytest.mark.soak  # the time for a hang doubles with each of them
def test_three_restarts_after_hangs_and_then_the_job_fails(place: Place) -> None:
    """Each restart is in the same pods, and together they are more than `job-retry-num`."""
    job = PlatformJob(place, {JOB_RETRY: "1", HANG_RETRY: "true"}, idle_timeout_s=0.3)
    job.hang()
    job.run.end(1)
    assert job.strategies() == [Strategy.HANG_RESTART] * 3 + [Strategy.FAIL]
    assert {each.placed for each in job.starts()} == {1}
    for rank in (0, 1):
        starts = [each for each in job.starts() if each.rank == rank]
        assert [each.started for each in starts] == [1, 2, 3, 4]
        assert len({each.agent for each in starts}) == 1
    assert job.isolated() == []


# ---- the annotations themselves


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({JOB_RETRY: "1"}, {"max_reschedules": 1, "unconditional": False}),
        ({JOB_RETRY: "128"}, {"max_reschedules": 128, "max_pod_reschedules": 0}),
        (EXAMPLE, {"max_reschedules": 8, "max_pod_reschedules": 3, "unconditional": True}),
    ],
    ids=["least", "most", "example"],
)
def test_values_that_are_accepted(
    place: Place, annotations: dict[str, str], expected: dict[str, object]
) -> None:
    """The file may be JSON, as in the document. `rekindle policy` prints what it means."""
    document = json.dumps({"kind": "job", "metadata": {"annotations": annotations}})
    (place.folder / "job.json").write_text(document)
    printed = shell(place, "policy", "job.json")
    assert printed.status == 0, printed.err
    policy = yaml.safe_load(printed.out)
    assert {name: policy[name] for name in expected} == expected
    assert ("hang-restart" in policy["strategies"]) is (HANG_RETRY in annotations)
    assert ("reschedule-pod" in policy["strategies"]) is (POD_RETRY in annotations)


@pytest.mark.parametrize(
    ("annotations", "key"),
    [
        ({JOB_RETRY: "0"}, JOB_RETRY),
        ({JOB_RETRY: "129"}, JOB_RETRY),
        ({JOB_RETRY: "1.5"}, JOB_RETRY),
        ({JOB_RETRY: "8", UNCONDITIONAL: "yes"}, UNCONDITIONAL),
        ({UNCONDITIONAL: "true"}, JOB_RETRY),
        ({HANG_RETRY: "true"}, JOB_RETRY),
        ({POD_RETRY: "3"}, JOB_RETRY),
        ({JOB_RETRY: "8", "fault-tolerance/pod-retry": "3"}, "fault-tolerance/pod-retry"),
    ],
    ids=lambda value: value.rpartition("/")[2] if isinstance(value, str) else "",
)
def test_values_that_are_refused(
    place: Place, annotations: dict[str, str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line names the file and the annotation, and no job starts."""
    (place.folder / "job.yaml").write_text(described(annotations))
    place.script("")
    assert shell(place, "run", "--policy", "job.yaml", "train.py").status == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "job.yaml" in line
    assert key in line
    assert not place.home.exists()
