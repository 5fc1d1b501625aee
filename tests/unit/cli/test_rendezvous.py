"""From a command line of torchrun to the part of this machine in the job."""

from __future__ import annotations

import argparse

import pytest

from rekindle import names
from rekindle.cli import options as declare
from rekindle.cli.local_options import RUN, of_variables
from rekindle.cli.main import command_parser
from rekindle.cli.rendezvous import Meeting, endpoint_without_effect, is_here, meeting_of
from rekindle.cli.run_spec import check_joiner, read_spec
from rekindle.errors import UsageError
from rekindle.job.addresses import ALL

OWN = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.9": "eth0", "192.168.7.1": "ib0"}


def parsed(*words: str) -> argparse.Namespace:
    return command_parser().parse_args(["run", *words, "train.py"])


def meeting(*words: str) -> Meeting:
    found = meeting_of(parsed(*words))
    assert found is not None
    return found


ALONE = [
    [],
    ["--nnodes", "2"],
    ["--nnodes", "1:2"],
    ["--nnodes", "2", "--node-rank", "0"],
    ["--nnodes", "2", "--node-rank", "0", "--listen", "10.0.0.1:29400"],
    ["--nnodes", "2", "--node-rank", "1", "--listen", "10.0.0.1:29400"],
    ["--nnodes", "2", "--node-rank", "0", "--listen", "10.0.0.1:0", "--master-addr", "10.0.0.1"],
    ["--nnodes", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"],
    ["--nnodes", "1", "--rdzv-endpoint", "10.0.0.1:29400", "--rdzv-backend", "c10d"],
    ["--nnodes", "2", "--standalone", "--rdzv-endpoint", "10.0.0.1:29400"],
    ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "123"],
]


@pytest.mark.parametrize("words", ALONE, ids=" ".join)
def test_commands_that_meet_no_other_machine(words: list[str]) -> None:
    """They run all nodes here, or wait for machines with --coordinator."""
    assert meeting_of(parsed(*words)) is None


MET = [
    ("--rdzv-endpoint=a --rdzv-backend=c10d", ("a", 29400, None, None)),
    ("--rdzv_endpoint=a:29500 --rdzv_backend=c10d", ("a", 29500, None, None)),
    ("--rdzv-endpoint=a:29500", ("a", 29500, None, None)),
    ("--rdzv-endpoint=a:29500 --node-rank=0", ("a", 29500, True, 0)),
    ("--rdzv-endpoint=a:29500 --node-rank=1", ("a", 29500, False, 1)),
    ("--rdzv-endpoint=a --rdzv-backend=static --node-rank=1", ("a", 29400, False, 1)),
    ("--rdzv-endpoint=a --rdzv-backend=c10d --node-rank=1", ("a", 29400, None, None)),
    ("--rdzv-endpoint=a --rdzv-conf=is_host=1", ("a", 29400, True, None)),
    ("--rdzv-endpoint=a --rdzv-conf=is_host=false", ("a", 29400, False, None)),
    ("--rdzv-endpoint=a --spare", ("a", 29400, False, None)),
    ("--master-addr=a --node-rank=0", ("a", 29500, True, 0)),
    ("--master_addr=a --master_port=5 --node_rank=1", ("a", 5, False, 1)),
    ("--master-addr=a --master-port=5", ("a", 5, None, None)),
    ("--master-port=5 --node-rank=1", ("127.0.0.1", 5, False, 1)),
]


@pytest.mark.parametrize(("words", "expected"), MET)
def test_where_machines_meet(words: str, expected: tuple[object, ...]) -> None:
    """Address, default port, host and node rank are those of torchrun."""
    found = meeting("--nnodes=2", *words.split())
    assert (found.host, found.port, found.hosts, found.node) == expected


def test_the_host_listens_on_loopback_only_for_an_endpoint_there() -> None:
    """Other machines never reach a part of a job whose endpoint is localhost."""
    for host in ("localhost", "127.0.0.1", "127.0.1.1"):
        assert meeting("--nnodes=2", f"--rdzv-endpoint={host}:5").listen == (names.LOOPBACK, 5)
    assert meeting("--nnodes=2", "--rdzv-endpoint=10.0.0.1:5").listen == (ALL, 5)


def test_how_long_a_machine_waits() -> None:
    """600 s as in torchrun, or the option, or --rdzv-conf."""
    endpoint = ["--nnodes=2", "--rdzv-endpoint=a"]
    assert meeting(*endpoint).limit_s == 600
    assert meeting(*endpoint, "--rdzv-conf=join_timeout=30,is_host=0").limit_s == 30
    assert meeting(*endpoint, "--rdzv-conf=timeout=40").limit_s == 40
    assert meeting(*endpoint, "--rdzv-conf=timeout=40", "--join-timeout=0").limit_s == 0


def test_options_without_effect_have_a_line() -> None:
    """torchrun's c10d ignores node ranks, and a job of one node does not use an endpoint."""
    c10d = ["--rdzv-endpoint=a", "--rdzv-backend=c10d", "--node-rank=0"]
    assert "--node-rank 0 has no effect" in meeting("--nnodes=2", *c10d).ignored
    assert not meeting("--nnodes=2", *c10d[:2]).ignored
    assert "--nnodes gives more" in endpoint_without_effect(parsed("--rdzv-endpoint=a:5"))
    for words in (["--rdzv-endpoint=localhost:5"], ["--nnodes=2", "--rdzv-endpoint=a"], []):
        assert not endpoint_without_effect(parsed(*words))


BAD = [
    ("--rdzv-endpoint=a --listen=a:5", "give one of them"),
    ("--rdzv-endpoint=a:2379 --rdzv-backend=etcd-v2", "give --rdzv-backend c10d"),
    ("--rdzv-endpoint=a:0", "give 1 to 65535"),
    ("--rdzv-endpoint=a:b", "give HOST:PORT"),
    ("--rdzv-endpoint=[::1]:29400", "an IPv4 address"),
    ("--rdzv-endpoint=0.0.0.0:29400", "of the first machine"),
    ("--rdzv-endpoint=a --rdzv-conf=store_type=file", "needs an address"),
    ("--rdzv-endpoint=a --rdzv-conf=is_host=maybe", "is_host=maybe: give 1 or 0"),
    ("--rdzv-endpoint=a --rdzv-conf=is_host", "give KEY=VALUE"),
    ("--rdzv-endpoint=a --rdzv-conf=timeout=long", "'long' is not a number"),
    ("--node-rank=1", "needs the address of the first machine"),
    ("--node-rank=2 --master-addr=a", "node ranks are 0 to 1"),
]


@pytest.mark.parametrize(("words", "text"), BAD)
def test_a_command_line_that_cannot_meet_others(words: str, text: str) -> None:
    """The line says what to give."""
    with pytest.raises(UsageError, match=text.replace("[", "[[]")):
        meeting_of(parsed("--nnodes=2", *words.split()))


@pytest.mark.parametrize(
    ("host", "found", "here"),
    [
        ("localhost", [], True),
        ("127.0.0.1", [], True),
        ("10.0.0.9", ["10.0.0.9"], True),
        ("trainer.svc", ["10.0.0.9"], True),
        ("trainer.svc", ["10.9.9.9", "192.168.7.1"], True),
        ("node-a", ["127.0.1.1"], True),
        ("node-a", [], True),
        ("node-b", [], False),
        ("node-b", ["10.0.0.2"], False),
    ],
)
def test_the_machine_of_an_address(host: str, found: list[str], here: bool) -> None:
    """It has the address at any interface, also as a second one, or has the name."""
    assert is_here(host, {"node-a"}, OWN, found) is here


def test_variables_of_torchrun() -> None:
    """They stand before the words of the command line, which so have priority."""
    variables = {
        "PET_NNODES": "2",
        "PET_RDZV_ENDPOINT": "",
        "PET_MASTER_ADDR": "a",
        "PET_NODE_RANK": "1",
        "PET_STANDALONE": "0",
        "PET_NO_PYTHON": "1",
        "PET_MINE": "5",
    }
    found = of_variables(variables)
    assert found == ["--nnodes=2", "--node-rank=1", "--master-addr=a", "--no-python"]
    assert command_parser().parse_args(["run", *found, "--nnodes", "3", "x"]).nnodes == "3"
    with pytest.raises(UsageError, match="PET_STANDALONE is 'yes'; give 1 or 0"):
        of_variables({"PET_STANDALONE": "yes"})


def test_given_options() -> None:
    """An option that has its default value by its own words is given."""
    words = ["--nproc-per-node", "1", "--allow-injection", "train.py", "--snapshot-every", "3"]
    found = declare.given(RUN, words)
    assert found >= {"nproc_per_node", "allow_injection"}
    assert not found & {"snapshot_every", "nnodes", "max_restarts"}


OTHERS = [
    ("--nproc-per-node 1", "processes_per_node is 1 here, and 2 in the job"),
    ("--nnodes 2", "min_nodes is 2 here, and 1 in the job"),
    ("--max-restarts 1", "policy.max_restarts is 1 here, and 0 in the job"),
    ("--snapshot-every 10", "snapshot_every is 10 here, and 5 in the job"),
    ("--policy p.yaml", "policy.max_restarts is 7 here, and 0 in the job"),
    ("--keep-best 3:loss", "keep.metric is loss here, and  in the job"),
    ("--link-factor 2", "node_check.link_factor is 2.0 here, and 1.15 in the job"),
    ("--allow-injection", "allow_injection is True here, and False in the job"),
    ("--rdzv-id other", "job_id is other here, and a in the job"),
]


@pytest.mark.parametrize(("words", "text"), OTHERS)
def test_a_joiner_with_another_value(
    words: str, text: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has both values of an option that is given, also if that is the default."""
    monkeypatch.chdir(str(tmp_path))
    with open("p.yaml", "w") as policy:
        policy.write("max_restarts: 7\n")
    of_job = "--nnodes 1:2 --nproc-per-node 2 --snapshot-every 5 --job-id a"
    job = read_spec(parsed(*of_job.split()))
    with pytest.raises(UsageError) as refused:
        check_joiner(parsed(*words.split()), declare.given(RUN, [*words.split(), "x"]), job)
    assert text in str(refused.value)
    check_joiner(parsed(*of_job.split()), declare.given(RUN, [*of_job.split(), "x"]), job)
    check_joiner(parsed(), declare.given(RUN, ["x"]), job)
