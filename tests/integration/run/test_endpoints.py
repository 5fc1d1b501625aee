"""torchrun's commands for several machines: two machines that share nothing form one job."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs import Place
from networks import ADDRESSES, DEVICE, NEEDS_NAMESPACES, Network, network
from waiting import bound_s, wait_until

from rekindle import names
from rekindle.job.journal_reader import events_in
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(300)

# Each rank prints each loss, and at the end the digest of its state. With KILL one rank of the
# second machine dies once.
SCRIPT = """
import hashlib, os, signal, torch
from pathlib import Path
from rekindle.training.torch import Session

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(30):
        with step:
            seed = torch.Generator().manual_seed(100 * step.number + session.rank)
            loss = session.model(torch.randn(4, 8, generator=seed)).square().mean()
            print("end", session.rank, step.number, loss.item().hex(), flush=True)
            optimizer.zero_grad()
            loss.backward()
            if os.environ.get("KILL") and session.rank == 3 and step.number == 12:
                if not Path("killed").exists():
                    Path("killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
state = [p.detach().numpy().tobytes() for p in model.parameters()]
state += [v.numpy().tobytes() for s in optimizer.state.values() for v in s.values()]
digest = hashlib.sha256(b"".join(state)).hexdigest()
print("end", session.rank, os.environ["WORLD_SIZE"], digest, flush=True)
"""

# DDP without Rekindle in the script.
PLAIN = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(1, 4) * (dist.get_rank() + 1)).sum().backward()
gradient = model.module.weight.grad[0, 0].item()
print("end", dist.get_rank(), dist.get_world_size(), os.environ["GROUP_RANK"], gradient, flush=True)
dist.barrier()
dist.destroy_process_group()
"""

# This one is faster, because no process imports torch.
QUICK = """
import os

print("end", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], flush=True)
"""
PROGRAM = ["--no-python", sys.executable, "-u", "train.py"]
SECOND_ADDRESS = "10.77.1.9"  # of the first machine
BOTH = {"end 0 2 0", "end 1 2 0"}


class Machine:
    """One of two machines that share nothing. Its /tmp is `folder`, seen from the test."""

    def __init__(self, folder: Path, number: int, found: Network) -> None:
        self.folder, self._number, self._network = folder, number, found
        self._runs: list[subprocess.Popen[bytes]] = []
        (folder / "work").mkdir(parents=True, exist_ok=True)

    def start(self, *command: str, script: str = SCRIPT, **variables: str) -> Started:
        """Start a command of `rekindle` in a folder of this machine with a script train.py."""
        (self.folder / "work" / "train.py").write_text(script)
        output = self.folder / f"output{len(self._runs)}"
        base = {name: value for name, value in os.environ.items() if not name.startswith("GLOO")}
        home = {names.ENV_HOME: "/tmp/home", "TMPDIR": "/tmp"}
        run = [sys.executable, "-m", "rekindle.cli.main", *command]
        with output.open("wb") as stream:
            inside = [*self._network.inside(self._number), "sh", "-c", 'cd /tmp/work; exec "$@"']
            process = subprocess.Popen(
                [*inside, "sh", *run],
                env=base | home | variables,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self._runs.append(process)
        return Started(process, output)

    def run(self, *command: str) -> None:
        """Run a command on this machine."""
        subprocess.run([*self._network.inside(self._number), *command], check=True)

    def events(self, job: str) -> Sequence[journal.AnyEvent]:
        """Return the events in the journal of a job whose coordinator this machine hosts."""
        return events_in(self.folder / "home" / "jobs" / job / names.JOURNAL_FILE)


class Started:
    """A command on a machine, and what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self._output = process, output

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, text: str) -> None:
        """Wait until the command has printed a text."""
        wait_until(lambda: text in self.text or self.process.poll() is not None, text)
        assert text in self.text, self.text

    def end(self, status: int = 0) -> set[str]:
        """Wait for the end; return the lines of the ranks that begin with `end`."""
        self.process.wait(bound_s())
        assert self.process.returncode == status, self.text
        return ends(self.text)


def ends(text: str) -> set[str]:
    """Return the lines of ranks that begin with `end`, without the names of the ranks."""
    lines = (line.partition("]:")[2] for line in text.splitlines())
    return {line for line in lines if line.startswith("end ")}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines. Only the first one's second name `trainer.svc` is known."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    with network(folders, f"{ADDRESSES[0]} trainer.svc\n") as found:
        yield Machine(folders[0], 0, found), Machine(folders[1], 1, found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The losses and the digests of all ranks of a run on one machine without a fault."""
    with Place(tmp_path_factory.mktemp("one") / "place") as place:
        run = place.start("--nnodes", "2", "--nproc-per-node", "2", place.script(SCRIPT)).end(0)
        assert "simulates 2 nodes" in run.stderr.splitlines()[0]
        return ends(run.stdout)


C10D = ["run", "--nnodes=2", "--nproc-per-node=2", "--rdzv_id=123", "--rdzv_backend=c10d"]


@NEEDS_NAMESPACES
def test_the_machine_of_the_endpoint_hosts_the_job(
    two: tuple[Machine, Machine], undisturbed: set[str]
) -> None:
    """The other machine starts first; a killed rank on it recovers, and the result is exact."""
    first, second = two
    command = [*C10D, "--rdzv_endpoint=trainer.svc:29500", "train.py"]
    late = second.start(*command, KILL="1")
    late.until("waits up to 600 s for the coordinator at trainer.svc:29500")
    early = first.start(*command, KILL="1")
    assert early.end() | late.end() == undisturbed
    assert (second.folder / "work" / "killed").exists()
    line = early.text.splitlines()[0]
    assert "hosts the coordinator of job 123" in line
    assert "all TCP ports must be open between the machines, not only 29500" in line
    for run in (early, late):
        assert run.text.count(f"{names.ENV_SECRET} is not set") == 1
    incidents = [e for e in journal.incidents(first.events("123")) if e.faults]
    assert [(e.cause.rank, e.cause.kind.value) for e in incidents] == [(3, "process")]
    assert not (second.folder / "home" / "jobs" / "123" / names.JOURNAL_FILE).exists()


@NEEDS_NAMESPACES
def test_the_machine_of_node_0_hosts_the_job(two: tuple[Machine, Machine]) -> None:
    """With --master-addr and --node-rank too. Strangers are refused if the job has a secret."""
    first, second = two
    static = ["run", "--nnodes", "2", "--master_addr", ADDRESSES[0]]
    secret = {names.ENV_SECRET: "of this job"}
    late = second.start(*static, "--node_rank", "1", "train.py", script=PLAIN, **secret)
    late.until(f"coordinator at {ADDRESSES[0]}:29500. The machine of node 0 hosts it")
    stranger = second.start(*static, "--node_rank", "1", "train.py", script=PLAIN)
    early = first.start(
        *static, "--node_rank", "0", "--rdzv-id", "static", "train.py", script=PLAIN, **secret
    )
    assert early.end() | late.end() == {"end 0 2 0 1.5", "end 1 2 1 1.5"}
    stranger.end(1)
    assert f"give the secret of this job in {names.ENV_SECRET}" in stranger.text
    for run in (early, late):
        assert f"{names.ENV_SECRET} is not set" not in run.text
        assert secret[names.ENV_SECRET] not in run.text


@NEEDS_NAMESPACES
def test_the_printed_command_works_on_another_machine(two: tuple[Machine, Machine]) -> None:
    """The line of the first machine contains a complete command, with the secret."""
    first, second = two
    host = first.start(
        *("run", "--nnodes", "2", "--node-rank", "0", "--listen", "0.0.0.0:29555", *PROGRAM),
        script=QUICK,
    )
    host.until("the other nodes join with: ")
    [line] = [line for line in host.text.splitlines() if "the other nodes join with: " in line]
    secret, rekindle, *command = shlex.split(line.partition("join with: ")[2])
    assert rekindle == "rekindle"
    name, _, value = secret.partition("=")
    other = second.start(*command, script=QUICK, **{name: value})
    assert host.end() | other.end() == BOTH


@NEEDS_NAMESPACES
def test_a_machine_with_other_values_ends_at_once(two: tuple[Machine, Machine]) -> None:
    """Its line has both values of each option, and the job still waits for another machine."""
    first, second = two
    first.run("ip", "address", "add", f"{SECOND_ADDRESS}/24", "dev", DEVICE)
    common = ["run", "--nnodes=2", f"--rdzv_endpoint={SECOND_ADDRESS}", "--rdzv_id=a"]
    host = first.start(*common, "--snapshot-every", "5", *PROGRAM, script=QUICK)
    host.until("hosts the coordinator")
    for options, words in (
        (["--nproc-per-node", "2"], "--nproc-per-node: processes_per_node is 2 here, and 1 in"),
        (["--max-restarts", "3"], "--max-restarts: policy.max_restarts is 3 here, and 0 in"),
        (["--snapshot-every", "10"], "--snapshot-every: snapshot_every is 10 here, and 5 in"),
        (["--rdzv_id=b"], "--rdzv-id: job_id is b here, and a in the job"),
    ):
        other = second.start(*common, *options, *PROGRAM, script=QUICK)
        other.end(2)
        assert words in other.text
    other = second.start(*common, *PROGRAM, script=QUICK)
    assert host.end() | other.end() == BOTH


# Waits until the test lets it end.
WAITS = """
import os, time

print("runs", os.environ["RANK"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((names.LOOPBACK, 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("variables", [False, True])
def test_two_commands_on_one_machine_form_one_job(place: Place, variables: bool) -> None:
    """One of them hosts the coordinator, and the other one joins. The options may be variables."""
    place.script(QUICK)
    options = {"nnodes": "2", "rdzv_endpoint": f"localhost:{free_port()}", "rdzv_backend": "c10d"}
    command = [] if variables else [f"--{name}={value}" for name, value in options.items()]
    more = {f"PET_{name.upper()}": value for name, value in options.items()} if variables else {}
    runs = [place.start(*command, *PROGRAM, env=place.environment(more)) for _ in range(2)]
    for run in runs:
        wait_until(run.has_ended, "the end of both commands")
        assert run.process.returncode == 0, run.story()
    assert set().union(*(ends(run.stdout) for run in runs)) == BOTH
    place.wait_for_silence()


def test_a_lost_machine_joins_again_with_the_same_command(place: Place) -> None:
    """The job waits for the machine, and restarts all ranks when it is there."""
    place.script(WAITS)
    command = ["--nnodes=2", f"--rdzv-endpoint=localhost:{free_port()}", "--max-restarts=1"]
    host = place.start(*command, *PROGRAM)
    wait_until(lambda: "hosts the coordinator" in host.stderr, "the host")
    lost = place.start(*command, *PROGRAM)
    wait_until(lambda: "runs" in host.stdout and "runs" in lost.stdout, "all ranks")
    lost.signal(signal.SIGKILL)
    again = place.start(*command, *PROGRAM)
    wait_until(lambda: host.stdout.count("runs") == 2 and "runs" in again.stdout, "a restart")
    (place.folder / "go").touch()
    for run, status in ((lost, -9), (host, 0), (again, 0)):
        wait_until(run.has_ended, "the end of the commands")
        assert run.process.returncode == status, run.story()
    assert "joins job job at localhost:" in again.stderr
    place.wait_for_silence()
