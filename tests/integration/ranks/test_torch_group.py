"""The default process group of one generation: forming, severing and leaving it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, formed, run, started
from repository import ROOT
from waiting import bound_s, run_command, wait_asleep, wait_until

from rekindle.errors import StaleError
from rekindle.training.torch.groups.ddp import wrap_ddp
from rekindle.training.torch.groups.generation_group import Group
from rekindle.training.torch.groups.gloo_waits import socket_inodes

FOREVER_S = 1e6  # a time-out of gloo that is longer than the test
EXPIRES_S = 0.5  # a time-out of gloo that ends within the test
PACE_S = 0.001  # between two sockets that the script opens


def total(rank: Rank) -> float:
    value = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(value)
    return value.item()


def sockets() -> int:
    return len(socket_inodes())


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(bound_s())
    return near, far


def intact(pair: tuple[socket.socket, socket.socket]) -> bool:
    near, far = pair
    near.sendall(b"x")
    return far.recv(1) == b"x"


def _generations(rank: Rank) -> list[float]:
    totals = []
    for generation in range(3):
        group = formed(rank, generation)
        totals.append(total(rank))
        group.leave()
    assert not dist.is_initialized()
    return totals


def test_generations_follow_each_other_over_one_store():
    """The collectives of each generation work over the process's existing store connection."""
    assert run(_generations, 3) == [[6.0, 6.0, 6.0]] * 3


def _waits_for_the_next_rank(rank: Rank) -> bool:
    """Return whether the test severed the rank before its collective ended."""
    group = formed(rank, timeout_s=FOREVER_S)
    pair = loopback_pair()
    severed = threading.Event()

    def control() -> None:
        rank.hear()
        severed.set()
        group.sever()
        group.sever()

    if rank.rank == 2:
        rank.tell("ready")
        rank.hear()
    thread = threading.Thread(target=control, daemon=True)
    if rank.rank == 0:
        thread.start()
    rank.tell("ready")
    with pytest.raises(RuntimeError):
        dist.recv(torch.empty(1), src=rank.rank + 1)
    is_severed = severed.is_set()
    # Gloo has closed the broken connection; these sockets reuse its descriptor number.
    pairs = [pair, *(loopback_pair() for _ in range(4))]
    if rank.rank == 1:
        rank.tell("woken")
        rank.hear()
    group.leave()
    assert all(intact(each) for each in pairs)
    rank.store.set(f"alive{rank.rank}", "yes")
    return is_severed


def test_sever_wakes_a_collective_that_waits_for_a_survivor():
    """`sever` immediately ends a wait for a living peer, and leaves all other sockets intact."""
    with started(_waits_for_the_next_rank, 3) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "ready"
        ranks.kill(2)
        assert ranks.hear(1) == "woken"  # the end of rank 2 ends this rank's wait
        ranks.tell(0, "sever")
        assert ranks.returned(0)
        ranks.tell(1, "leave")
        ranks.returned(1)


def test_sever_wakes_the_peers_of_the_severed_rank():
    """If a peer severs its group, a rank leaves its collective without a request."""
    with started(_waits_for_the_next_rank, 3) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "ready"
        ranks.kill(2)
        assert ranks.hear(1) == "woken"
        ranks.tell(1, "leave")
        ranks.returned(1)
        assert not ranks.returned(0)


def _sever_in_the_wait(group: Group) -> None:
    """Sever a group while the main thread waits for the store or for a peer."""
    wait_asleep(threading.main_thread())
    group.sever()


def _forms_alone(rank: Rank, waits: bool) -> None:
    group = Group()

    def control() -> None:
        wait_until(lambda: group._forming is not None, "a group that forms")
        if waits:
            _sever_in_the_wait(group)
        else:
            group.sever()

    threading.Thread(target=control, daemon=True).start()
    with pytest.raises(StaleError, match="generation 7"):
        group.form(
            store=rank.store,
            generation=7,
            rank=0,
            world_size=2,
            backend="gloo",
            timeout_s=FOREVER_S,
        )
    group.leave()
    rank.store.set("alive", "yes")
    assert rank.store.get("alive") == b"yes"
    alone = formed(rank, 8)
    assert total(rank) == 1.0
    alone.leave()


@pytest.mark.parametrize("waits", [False, True])
def test_sever_ends_the_wait_for_a_peer_that_never_comes(waits: bool):
    """After `sever`, form() raises StaleError, and the process can form the next generation."""
    run(_forms_alone, 1, waits)


def _forms_with_a_mute(rank: Rank, sever: str, timeout_s: float) -> str:
    """Form with a dead rank 1 of 2; its address is forged from rank 0's."""
    group = Group()

    def control() -> None:
        wait_until(lambda: any(key.startswith("gen7/") for key in rank.store.list_keys()), "gen7")
        mine_key = next(key for key in rank.store.list_keys() if key.startswith("gen7/"))
        assert mine_key.endswith("/0")
        mine = rank.store.get(mine_key)
        # The rank with the lower port waits for the connection of the other.
        forged, count = re.subn(rb"(?s)\x02\0..\x7f\0\0\x01", b"\x02\0\xff\xff\x7f\0\0\x01", mine)
        assert count == 1
        rank.store.set(mine_key.removesuffix("0") + "1", forged)
        if sever == "in its wait":
            _sever_in_the_wait(group)
        elif sever == "at once":
            group.sever()

    threading.Thread(target=control, daemon=True).start()
    with pytest.raises((StaleError, RuntimeError)) as error:
        group.form(
            store=rank.store,
            generation=7,
            rank=0,
            world_size=2,
            backend="gloo",
            timeout_s=timeout_s,
        )
    group.leave()
    return f"{error.typename}: {error.value}"


@pytest.mark.parametrize("sever", ["at once", "in its wait"])
def test_sever_ends_the_wait_for_the_connection_of_a_dead_peer(sever: str):
    """After `sever`, form() raises StaleError even if a peer ended before it connected."""
    [error] = run(_forms_with_a_mute, 1, sever, FOREVER_S)
    assert error.startswith("StaleError")


def test_the_forged_peer_is_waited_for():
    """Without `sever`, gloo waits for the forged peer's connection until its time-out.

    This shows that the test above tests `sever`.
    """
    [error] = run(_forms_with_a_mute, 1, "never", EXPIRES_S)
    assert "onnect" in error


def _severed_before(rank: Rank) -> None:
    group = Group()
    group.sever()
    with pytest.raises(StaleError):
        group.form(
            store=rank.store,
            generation=1,
            rank=0,
            world_size=2,
            backend="gloo",
            timeout_s=FOREVER_S,
        )
    assert group.severed
    group.leave()


def test_a_group_severed_early_is_never_formed():
    """A `sever` before form() makes form() raise StaleError."""
    run(_severed_before, 1)


def _asks_for_nccl(rank: Rank, chosen: str | None) -> str:
    name = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    os.environ.pop(name, None)
    if chosen is not None:
        os.environ[name] = chosen
    group = Group()
    with contextlib.suppress(RuntimeError):  # without a GPU there is no NCCL
        group.form(
            store=rank.store,
            generation=1,
            rank=0,
            world_size=1,
            backend="nccl",
            timeout_s=FOREVER_S,
        )
    group.leave()
    return os.environ[name]


@pytest.mark.parametrize(("chosen", "used"), [(None, "0"), ("1", "1")])
def test_nccls_watchdog_leaves_a_kernels_error_to_the_script(chosen: str | None, used: str):
    """NCCL's watchdog leaves the error of a kernel to the script, unless the user sets otherwise.

    On an H100 the watchdog aborted the process of a failed device-side assert, without a cause.
    """
    assert run(_asks_for_nccl, 1, chosen) == [used]


def _opens_sockets_while_forming(rank: Rank) -> None:
    pairs: list[tuple[socket.socket, socket.socket]] = []
    done = threading.Event()

    def script() -> None:
        while not done.wait(PACE_S) and len(pairs) < 100:
            pairs.append(loopback_pair())

    thread = threading.Thread(target=script)
    thread.start()
    try:
        for generation in range(5):
            group = formed(rank, generation)
            total(rank)  # after this no peer is still forming
            group.sever()
            with pytest.raises(RuntimeError):
                total(rank)
            group.leave()
    finally:
        done.set()
        thread.join()
    assert all(intact(pair) for pair in pairs)


def test_sockets_opened_by_other_threads_meanwhile_are_left_alone():
    """`sever` closes only gloo's connections, not other sockets opened during form()."""
    run(_opens_sockets_while_forming, 2)


def _many_generations(rank: Rank) -> None:
    hook = sys.excepthook
    model = torch.nn.Linear(4, 4)
    early = (0, 0)
    for generation in range(50):
        group = formed(rank, generation)
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        wrapper(torch.ones(2, 4)).sum().backward()
        group.leave()
        del wrapper
        if generation == 3:
            early = (threads(), sockets())
    assert sys.excepthook is hook
    # Other threads destroy the old groups a little later.
    wait_until(lambda: threads() <= early[0] and sockets() <= early[1], "the end of old groups")


def test_fifty_generations_leak_neither_threads_nor_sockets():
    """After 50 generations with a DDP wrapper each, no threads or sockets have leaked."""
    run(_many_generations, 2)


def groups() -> int:
    """Return the number of groups that exist: each has one gloo thread that listens."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the task has ended
            count += (task / "comm").read_text() == "gloo_tcp_loop\n"
    return count


def _interrupted_before_the_wrapper(rank: Rank) -> int:
    model = torch.nn.Linear(4, 4)
    first = formed(rank, 0)
    wrapper = wrap_ddp(model, existing=None)  # creates one more group, which stays
    total(rank)
    first.leave()
    second = formed(rank, 1)
    total(rank)  # otherwise the peer may still be connecting
    second.leave()  # ends before the renewal of the wrapper
    third = formed(rank, 2)
    # A thread gets its name a moment after its start.
    wait_until(lambda: groups() == 4, "four groups")
    wrap_ddp(model, existing=wrapper)
    after = groups()
    total(rank)
    third.leave()
    fourth = formed(rank, 3)
    total(rank)
    fourth.leave()
    wait_until(lambda: groups() <= 3, "the end of old groups")  # the last two stay
    return after


def test_a_group_that_a_wrapper_still_holds_is_not_freed_by_its_renewal():
    """The renewal of a wrapper does not destroy its old group, which can block without end.

    A thread that does not train destroys it later.
    """
    assert run(_interrupted_before_the_wrapper, 2) == [4, 4]


_SCRIPT = """
import torch.distributed as dist
from rekindle.training.torch.groups.generation_group import Group

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for generation in range(4):
    group = Group()
    group.form(
        store=store, generation=generation, rank=0, world_size=1, backend="gloo", timeout_s=30
    )
    group.leave()
"""


def test_a_process_that_left_its_groups_ends_well():
    """A process that has left its groups exits with status 0 and without an error message.

    No thread destroys a group during the interpreter's exit.
    """
    done = run_command([sys.executable, "-c", _SCRIPT], cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
