"""ModelArts: fault recovery of training jobs."""

from __future__ import annotations

from specification.row import Document, none, run, source

_HERE = "integration/specification/test_004.py"
_REFUSED = f"{_HERE}::test_values_that_are_refused"
_ACCEPTED = f"{_HERE}::test_values_that_are_accepted"
_FOURTH = f"{_HERE}::test_the_fourth_failure_in_succession_ends_the_job"
_HANGS = f"{_HERE}::test_three_restarts_after_hangs_and_then_the_job_fails"
_HANG = "integration/faults/test_hangs.py::test_a_script_without_a_session"
_DEVICE = (
    "integration/run/test_real_devices.py::test_a_fault_code_of_the_machine_is_read_and_healed"
)
_STAYS = f"{_HERE}::test_a_fault_that_stays_after_the_restart_isolates_its_node"
_GRACE = "unit/job/test_failover_grace.py::test_an_old_pod_is_waited_for_so_long_after_its_grace"
_NOT_MOUNTED = "unit/job/test_failover_grace.py::test_what_is_no_number_of_seconds_is_refused"
_SAVED = "integration/faults/test_final_checkpoint.py::test_end"
_LADDER = "unit/recovery/policy/test_ladder_modelarts.py::test_the_ladder_does_as_modelarts"
_ENABLE = "Constraints"
_TABLE = "Table 1, the strategies"
_CONSOLE = "Enabling: console"
_API = "Enabling: API"
_VARIABLES = "Environment variables"
_IN_PLACE = "Recovery in place"
_DEGRADED = "Recovery in place: degradation"
_CODES = "Recovery in place: fault codes"
_UNCONDITIONAL = "Unconditional rescheduling of the job"
_ISOLATED = "Isolated rescheduling of the job"
_POD = "Rescheduling of a pod"
_HUNG = "Restart after a hang"


def _example(act: str) -> str:
    return f"{_HERE}::test_the_example[{act}]"


def _limited(act: str) -> str:
    return f"{_HERE}::test_automatic_restart[{act}]"


_NEW = _example("a_new_job_counts_from_one")
_MEMORY = _example("a_memory_error_restarts_in_place")
_CHIP = _example("another_code_of_a_chip_restarts_in_place")
_THIRD = _example("the_third_time_isolates_the_node")
_CRITICAL = _example("a_critical_fault_cannot_heal")
_SCRIPT = _example("a_script_that_fails_is_placed_again")
_LOST = _example("a_lost_node_places_only_its_pod")
_UNHEALED = _limited("a_chip_that_does_not_heal_isolates_its_node")

_RESUMES = (
    "A script with a Session has snapshots, checkpoints and a resume. A script without one keeps "
    "its own."
)
_REENTRANT = "The processes end, and the container and its files stay. The script must accept that."

ROWS = (
    run(
        "Scenario",
        "A fault of a node or an abnormal end starts the recovery without a person.",
        "The coordinator decides about each fault by the policy that the annotations make.",
        _SCRIPT,
        _LOST,
    ),
    run(
        _ENABLE,
        "The user's code must resume from checkpoints before this is enabled.",
        _RESUMES,
        _SAVED,
    ),
    run(
        _TABLE,
        "In place: nothing is scheduled; the job restarts in its containers.",
        "The agents stay, and only the ranks are new.",
        _MEMORY,
        _CHIP,
    ),
    run(
        _TABLE,
        "In place is for chip faults that can heal; the example is HBM multi-bit ECC.",
        "Code `80E01801` leads to `restart`.",
        _MEMORY,
    ),
    run(
        _TABLE,
        "In place keeps the environment of the container; the script must be re-entrant.",
        _REENTRANT,
        _MEMORY,
    ),
    run(
        _TABLE,
        "In place needs no spare machine.",
        "The ranks start again on the same hosts.",
        _CHIP,
    ),
    run(
        _TABLE,
        "Unconditional: at an exit status other than 0 all pods end, and the job is built again.",
        "`reschedule-job`: all agents are new. In Kubernetes the Job object stays: the engine "
        "suspends and resumes it, so all its pods are new.",
        _SCRIPT,
        "integration/pods/test_placed_anew.py::test_the_job_is_placed_anew",
    ),
    run(
        _TABLE,
        "Unconditional is for accidental software faults and for network jitter.",
        "The exit status alone counts. With a Session, `retry` comes first.",
        _SCRIPT,
    ),
    run(
        _TABLE,
        "Unconditional needs processes that end at an error, with a status other than 0.",
        "A status of 0 is a success. A job that stays alive leads to no rescheduling.",
        _FOURTH,
    ),
    run(
        _TABLE,
        "Unconditional needs no spare machine.",
        "The job may get the same hosts again; none is isolated.",
        _SCRIPT,
    ),
    run(
        _TABLE,
        "Isolated: at a node's fault the node is isolated before the job is scheduled.",
        "`reschedule-job-isolated`: the event `isolated` precedes the next attempt, which avoids "
        "the host.",
        _UNHEALED,
        _example("after_the_last_pod_the_whole_job_is_placed"),
        "integration/pods/test_isolated_hosts.py::test_the_job_is_placed_anew_off_the_host",
    ),
    run(
        _TABLE,
        "Isolated is for every chip fault and for node faults.",
        "Codes that no reset heals, failed resets and lost nodes lead to it. A code that the user "
        "causes does not (see the degradation of recovery in place).",
        _UNHEALED,
        _limited("at_the_limit_the_job_fails"),
    ),
    run(
        _TABLE,
        "Isolated needs a healthy spare machine.",
        "Without another host the job waits for `node_timeout_s` and then fails with that reason.",
        "integration/pods/test_isolated_hosts.py::test_there_is_no_other_host",
    ),
    run(
        _TABLE,
        "Pod: the job instance stays; the node is isolated first, and only the faulty pod is new.",
        "`reschedule-pod`: the agents of the other nodes stay, and their ranks restart.",
        _THIRD,
        _LOST,
    ),
    run(
        _TABLE,
        "Pod is for every chip fault and for node faults.",
        "As for the isolated rescheduling.",
        _CRITICAL,
        _LOST,
    ),
    run(
        _TABLE,
        "Pod keeps the environment of the other containers; the script must be re-entrant.",
        "`MA_PROC_START_CNT` rises on the other nodes, and `MA_SCHEDULE_CNT` does not.",
        _LOST,
    ),
    run(
        _TABLE,
        "Pod needs a healthy spare machine.",
        "The new pod runs on a host that is not isolated.",
        _LOST,
        "integration/pods/test_left_hosts.py::test_a_condition_that_ends_a_node",
    ),
    run(
        _TABLE,
        "Hang: the platform detects a hang while the job runs, and ends the user's processes.",
        "The job hangs if all processes of all ranks do nothing for `idle_timeout_s` (30 min).",
        _HANG,
        _HANGS,
    ),
    run(
        _TABLE,
        "Hang: the containers stay, and the start command runs again after the processes ended.",
        "`hang-restart`: the agents start all ranks again.",
        _HANGS,
    ),
    run(
        _TABLE,
        "Hang: nothing is scheduled, and no spare machine is needed.",
        "The hosts and agents stay.",
        _HANGS,
    ),
    none(
        _CONSOLE,
        "The user enables the recovery in the console, in its step for high availability.",
        "There is no such console. Prefect's form has the field `policy` instead.",
    ),
    run(
        _CONSOLE,
        "Automatic restart has the recovery in place and the isolated rescheduling.",
        "`job-retry-num` alone allows `restart` for chip faults and `reschedule-job-isolated`. An "
        "exit status other than 0 alone fails the job.",
        _UNHEALED,
        f"{_HERE}::test_a_failure_alone_places_no_job",
    ),
    run(
        _CONSOLE,
        "The recovery in place does not use up the largest number of restarts.",
        "It counts for `max_recoveries` (128) instead. ModelArts states no such limit.",
        _limited("restarts_in_place_use_up_nothing"),
    ),
    run(
        _CONSOLE,
        "Unconditional automatic restart has the unconditional rescheduling of the job.",
        "`unconditional` becomes true.",
        _FOURTH,
    ),
    run(
        _CONSOLE,
        "A restart after a hang does not use up the largest number of restarts.",
        "Three restarts follow with `job-retry-num` 1.",
        _HANGS,
    ),
    run(
        _API,
        "The annotations are in the field `metadata`, in `annotations`.",
        "`rekindle run --policy FILE` and `rekindle policy FILE` read such an object, as YAML or "
        "JSON.",
        _ACCEPTED,
        _NEW,
    ),
    source(
        _API,
        "The annotations belong to the object of the job.",
        "In a job of Kubernetes `kubernetes.annotations` refuses them, with the place to write "
        "them: the policy of the job. There each number is a field, such as `max_reschedules`.",
        "unit/engines/kubernetes/manifests/test_division.py::test_each_rule_is_in_its_place",
    ),
    run(
        _API,
        "Annotation `fault-tolerance/job-retry-num`: it enables automatic restarts.",
        "It allows them, and sets `max_reschedules`.",
        _ACCEPTED,
        _limited("at_the_limit_the_job_fails"),
    ),
    run(
        _API,
        "`fault-tolerance/job-retry-num` is any whole number from 1 to 128.",
        "Another value is refused with one line, and no job starts.",
        _ACCEPTED,
        _REFUSED,
    ),
    run(
        _API,
        "Unconditional restart needs `job-retry-num` and "
        "`fault-tolerance/job-unconditional-retry` with the value `true`.",
        "Rekindle refuses the second one without the first one, and words other than true and "
        "false.",
        _FOURTH,
        _REFUSED,
    ),
    run(
        _API,
        "Restart after a hang needs `job-retry-num` and `fault-tolerance/hang-retry` with `true`.",
        "The second one without the first one is refused.",
        _HANGS,
        _REFUSED,
    ),
    run(
        _API,
        "Rescheduling of a pod needs `job-retry-num` and `fault-tolerance/pod-retry-num`.",
        "The second one without the first one is refused. It sets `max_pod_reschedules`.",
        _example("after_the_last_pod_the_whole_job_is_placed"),
        _REFUSED,
    ),
    run(
        _API,
        "The annotations are optional.",
        "Without a policy `rekindle run` restarts nothing, as torchrun: the job fails.",
        "integration/run/test_failures.py::test_an_untouched_rank_that_ends",
    ),
    run(
        _API,
        "An annotation has one of the listed names, and its value is a text.",
        "Another name that begins with `fault-tolerance/` is refused.",
        _REFUSED,
    ),
    run(
        _API,
        "The example has the numbers 8 and 3 and both other annotations.",
        "It is accepted, and a job runs with it.",
        _ACCEPTED,
        _NEW,
    ),
    run(
        _VARIABLES,
        "`MA_SCHEDULE_CNT` is 1 for a new job.",
        "It is 1.",
        _NEW,
    ),
    run(
        _VARIABLES,
        "`MA_SCHEDULE_CNT` rises by 1 with each rescheduling of the pod of the task.",
        "It rises with `reschedule-pod` for that node, and with both job reschedules for all.",
        _SCRIPT,
        _LOST,
    ),
    run(
        _VARIABLES,
        "`MA_PROC_START_CNT` is 1 for a new job and after a rescheduling.",
        "It is 1 in each new pod.",
        _NEW,
        _LOST,
    ),
    run(
        _VARIABLES,
        "`MA_PROC_START_CNT` rises by 1 with each recovery in place and restart after a hang.",
        "It rises with each start of the rank by its agent.",
        _CHIP,
        _HANGS,
    ),
    none(
        _VARIABLES,
        "`MA_PROC_START_CNT` counts the starts of the user's script in the pod.",
        "It counts the starts of each rank. A rank that `recover-in-place` replaces alone (only "
        "with a Session) has a larger number than the other ranks of its pod, whose variables "
        "nobody can change while they run.",
    ),
    none(
        _VARIABLES,
        "`MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS`: after N seconds the volumes of a "
        "container that ends are unmounted in the background.",
        "Rekindle unmounts no volume. It removes the old pod by force N seconds after its grace "
        "period, and the host unmounts the volumes later.",
    ),
    source(
        _VARIABLES,
        "`MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS` is a positive whole number.",
        "Another value is refused before the job starts. It has an effect in Kubernetes only, from "
        "the `environment` of the job.",
        _NOT_MOUNTED,
        _GRACE,
    ),
    source(
        _VARIABLES,
        "10 is advised with SFS Turbo.",
        "10 is what the default of -1 means here.",
        _GRACE,
    ),
    none(
        _VARIABLES,
        "The default of `MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS` is -1: not in the "
        "background.",
        "-1 is the default, but Rekindle also removes the pod by force then, 10 s after its grace "
        "period. Otherwise the pod of a lost host would keep its place in the job.",
    ),
    run(
        _IN_PLACE,
        "At a fault that can heal, the system ends the user's processes, and keeps the container.",
        "As table 1.",
        _CHIP,
    ),
    run(
        _IN_PLACE,
        "After all processes ended, the system tries to heal the chip.",
        "The agent calls `npu-smi set -t reset` before it starts the rank again, if the code asks "
        "for a reset, no process uses the reset group, and the node has the whole group. Doubles "
        "of DCMI and npu-smi show the calls; no test ran on an NPU.",
        _DEVICE,
    ),
    run(
        _IN_PLACE,
        "The system resets the chip of a job that has these annotations.",
        "`job-retry-num` sets `device_resets`, which a reset outside of Kubernetes needs.",
        f"{_HERE}::test_the_annotations_alone_allow_a_reset",
    ),
    none(
        _IN_PLACE,
        "The start command runs again only if the fault has gone.",
        "For a code of the levels RestartRequest and RestartBusiness, such as HBM multi-bit ECC, "
        "Rekindle starts the ranks first, because the end of the old processes heals the chip. A "
        "code that DCMI still reports 10 s later was not healed.",
    ),
    run(
        _IN_PLACE,
        "If the fault has gone, all containers run the start command again.",
        "All ranks of all nodes restart.",
        _CHIP,
    ),
    run(
        _IN_PLACE,
        "The trigger is a chip fault that can heal.",
        "DCMI, MindCluster and `rekindle report-fault` report its code.",
        _DEVICE,
        _MEMORY,
    ),
    run(
        _IN_PLACE,
        "The script tests `MA_PROC_START_CNT` for a recovery in place.",
        "It is above 1 then.",
        _MEMORY,
    ),
    run(
        _DEGRADED,
        "If the chip does not heal, the node is isolated, and the job is placed again without it.",
        "A reset that was tried and failed does so. A reset that could not be tried leads to a "
        "plain restart with the reason.",
        _UNHEALED,
        _DEVICE,
    ),
    run(
        _DEGRADED,
        "A fault that stays after the recovery in place counts as not healed.",
        "A code without a reset, such as `80E01801`, that DCMI still reports for 10 s after the "
        "start of the new process isolates the node. Codes of MindCluster's ConfigMap alone and of "
        "`rekindle report-fault` do not: nobody reports these again.",
        _STAYS,
    ),
    run(
        _DEGRADED,
        "The same code 3 consecutive times in 24 hours on one chip of one node isolates the node.",
        "The third time does so, for each listed code without a rule of its own.",
        _THIRD,
    ),
    source(
        _DEGRADED,
        "Only times within 24 hours on the same chip count.",
        "Older ones, other codes and other chips end or do not extend the succession. A run would "
        "take a day, so only the decision is tested.",
        _LADDER,
    ),
    run(
        _DEGRADED,
        "A code that the user's input causes, such as `80C98002`, isolates no node at the third "
        "time; the job is only placed again.",
        "`reschedule-job`, also without `job-unconditional-retry`.",
        _example("what_the_user_causes_isolates_nothing"),
        _LADDER,
    ),
    source(
        _DEGRADED,
        "`80CB8002` is another such code.",
        "The same entry of the tables has both.",
        _LADDER,
    ),
    none(
        _CODES,
        "Three manuals define the codes: for A3, for A2 and for training servers (25.3.RC1).",
        "The tables have MindCluster's levels (device plugin, 2026-08-21) instead of these three "
        "manuals. No comparison with the manuals was made.",
    ),
    run(
        _CODES,
        "Codes of the severities minor and major usually can heal.",
        "A code without an entry and with one of them leads to a restart with a reset. A code "
        "with an entry has MindCluster's level.",
        _example("minor_and_major_faults_heal"),
    ),
    run(
        _CODES,
        "A notice needs nothing.",
        "The journal has it, and training continues.",
        _example("a_notice_needs_nothing"),
    ),
    run(
        _CODES,
        "A critical fault cannot heal.",
        "The host is isolated at once.",
        _CRITICAL,
    ),
    run(
        _CODES,
        "The user then examines the version of CANN, the operators and the data.",
        "The reason of the incident names all three.",
        _example("what_the_user_causes_isolates_nothing"),
    ),
    run(
        _UNCONDITIONAL,
        "At an exit status other than 0 all pods end, and the job is built again.",
        "As table 1.",
        _SCRIPT,
    ),
    source(
        _UNCONDITIONAL,
        "If the job cannot end at an error, nothing is rescheduled.",
        "Such a job hangs. `hang-retry` answers that, or the job fails.",
        _LADDER,
    ),
    run(
        _UNCONDITIONAL,
        "After 3 consecutive times, the fourth occurrence of the problem fails the job.",
        "The reason names the script as the likely cause.",
        _FOURTH,
    ),
    source(
        _UNCONDITIONAL,
        "A fault of a node or chip in between begins the count again.",
        "So it does. A restart after another problem ends the succession too.",
        _LADDER,
    ),
    run(
        _ISOLATED,
        "The triggers are a node's fault, and a degradation that the user did not cause.",
        "Both lead to `reschedule-job-isolated`.",
        _UNHEALED,
        _example("after_the_last_pod_the_whole_job_is_placed"),
    ),
    run(
        _ISOLATED,
        "It has no degradation: nothing replaces it.",
        "Its limit is `job-retry-num`. At the limit the job fails.",
        _limited("at_the_limit_the_job_fails"),
    ),
    run(
        _POD,
        "The job instance stays, the node is isolated first, and only the faulty pod is new.",
        "As table 1.",
        _LOST,
        _THIRD,
    ),
    run(
        _POD,
        "The triggers are those of the isolated rescheduling.",
        "With `pod-retry-num` they lead to `reschedule-pod`.",
        _THIRD,
        _CRITICAL,
        _LOST,
    ),
    source(
        _POD,
        "If it fails, the whole job is placed again; the node is isolated already.",
        "`reschedule-job`, also without `job-unconditional-retry`.",
        _LADDER,
        "integration/pods/test_placed_anew.py::test_no_room_for_another_pod",
    ),
    run(
        _HUNG,
        "It applies only if no hardware fault is there.",
        "Rekindle answers the code of a device at once, so a job that hangs because of it restarts "
        "with a reset. A fault that nobody reports is unknown.",
        f"{_HERE}::test_a_hang_with_a_hardware_fault_is_that_fault",
    ),
    source(
        _HUNG,
        "A job that hangs cannot be rescheduled. Only this setting restarts it.",
        "`reschedule-job` never answers a hang.",
        _LADDER,
    ),
    none(
        _HUNG,
        "The rules of the detection are those of another page of ModelArts.",
        "The rule is the activity of the processes for `idle_timeout_s`, whose default of 30 min "
        "is that of ModelArts. Other rules of that page were not compared.",
    ),
    run(
        _HUNG,
        "The system detects hangs of jobs on NPUs and on GPUs.",
        "It watches processes, and the utilization of devices that `npu-smi` or `nvidia-smi` "
        "reports. The run is on CPUs.",
        _HANG,
    ),
    run(
        _HUNG,
        "After 3 consecutive restarts the system ends the job as failed.",
        "At the fourth hang the job fails.",
        _HANGS,
    ),
)

DOCUMENT = Document("004", "ModelArts: fault recovery of training jobs", ROWS)
