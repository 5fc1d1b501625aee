"""A loop with MindIO's names, in the order of Megatron's and MindSpeed's adaptors, on gloo.

The adaptors use torch-npu's `reinit_process_group`; this script creates new groups instead.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from waiting import bound_s

from rekindle import names
from rekindle.training import mindio
from rekindle.training.mindio import framework

assert mindio.install()
from mindio_ttp import framework_ttp as tft  # noqa: E402

from training_jobs.injection import Injector  # noqa: E402

WIDTH, BATCH = 16, 4


class Adaptor:
    """One rank: its model, its handlers and its loop.

    `joins`: whether this process joins ranks that already train.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.finished = folder, steps, 0
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.faults = Injector(folder, self.rank)
        tft.tft_init_processor(self.rank, self.world, False, False, "", True, True)
        tft.tft_start_processor("127.0.0.1", 8000)
        self.faults.watch(framework.current().member)
        self.joins = tft.tft_is_reboot_node()
        if not self.joins:
            self.connect()
        torch.manual_seed(1)
        self.model = torch.nn.Linear(WIDTH, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        everyone = list(range(self.world))
        replica = {"rank_list": everyone, "replica_cnt": self.world, "replica_shift": 0}
        tft.tft_set_optimizer_replica(self.rank, [replica])
        tft.tft_register_stop_handler(self.stop)
        tft.tft_register_clean_handler(self.clean)
        tft.tft_register_rebuild_group_handler(self.rebuild)
        tft.tft_register_repair_handler(self.repair)
        tft.tft_register_rollback_handler(self.rollback)
        # The exception of gloo for a lost rank. Rekindle already knows HCCL's texts.
        tft.tft_register_exception_handler("gloo", "RS_HCCL_FAILED", lambda text: "gloo")

    def connect(self) -> None:
        """Form the group of all ranks, with the store of the agent."""
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        # The generation is the only value that all ranks know and that differs between groups.
        generation = str(framework.current().generation)
        dist.distributed_c10d._world.group_count = (
            0  # names contain this counter, which also counts failed groups
        )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(generation, store),
            rank=self.rank,
            world_size=self.world,
            # also limits the wait for a peer that ended in between
            timeout=timedelta(seconds=bound_s(15.0)),
        )

    def note(self, *call: Any) -> None:
        """Record the arguments of a handler's call."""
        with (self.folder / f"calls-{self.rank}.jsonl").open("a") as calls:
            calls.write(json.dumps(call) + "\n")

    def stop(self, args: Any, ctx: Any) -> None:
        self.note("stop")

    def clean(self, is_uce_error: bool, args: Any, ctx: Any) -> int:
        self.note("clean", is_uce_error)
        return 0

    def rebuild(self, fault_ranks: list[int], args: Any, ctx: Any) -> None:
        self.note("rebuild", fault_ranks, tft.tft_get_repair_type())
        self.faults.step = tft.tft_get_repair_step()
        self.faults.at("rebuild")
        if dist.is_initialized():
            dist.destroy_process_group()
        self.connect()
        self.joins = False

    def repair(
        self,
        step: int,
        need_rebuild: bool,
        error_ranks: list[int],
        repair_info: dict[str, Any],
        args: Any,
        ctx: Any,
    ) -> None:
        kind = tft.RepairType(repair_info["repair_type"])
        self.note("repair", step, kind.name, error_ranks)
        for source, target in zip(repair_info["src"], repair_info["dst"], strict=True):
            if kind is tft.RepairType.RT_SEND:
                file = io.BytesIO()
                torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
                data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
                dist.send(torch.tensor([len(data)]), target)
                dist.send(data, target)
            else:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, source)
                data = torch.zeros(int(size), dtype=torch.uint8)
                dist.recv(data, source)
                model, optimizer = torch.load(io.BytesIO(data.numpy().tobytes()))
                self.model.load_state_dict(model)
                self.optimizer.load_state_dict(optimizer)

    def rollback(self, step: int, args: Any, ctx: Any) -> None:
        self.note("rollback", step)
        self.finished = step

    @tft.tft_exception_handler
    def train(self) -> None:
        """Run the remaining steps."""
        if self.joins:
            raise RuntimeError("ARF FINISH")
        with Path(os.environ[names.ENV_METRICS_FILE]).open("a") as metrics:
            while self.finished < self.steps:
                self.step(metrics)

    def step(self, metrics: Any) -> None:
        self.faults.step = self.finished
        self.faults.at("forward")
        chance = torch.Generator().manual_seed(1000 * self.finished + self.rank)
        x = torch.randn(BATCH, WIDTH, generator=chance)
        loss = (self.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        line = {"step": self.finished, "metrics": {"loss": loss.item()}}
        metrics.write(json.dumps(line) + "\n")
        metrics.flush()
        dist.barrier()  # keeps all ranks within one update of each other
        tft.tft_start_updating_os()
        self.faults.at("update")
        self.optimizer.step()
        self.finished += 1
        tft.tft_end_updating_os(self.finished)

    def report(self) -> None:
        """Write the result for the test."""
        parameters = [each.detach().numpy().tobytes() for each in self.model.parameters()]
        digest = hashlib.sha256(b"".join(parameters)).hexdigest()
        result = {"pid": os.getpid(), "digest": digest}
        (self.folder / f"result-{self.rank}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    adaptor = Adaptor(options.folder, options.steps)
    adaptor.train()
    adaptor.report()


if __name__ == "__main__":
    main()
