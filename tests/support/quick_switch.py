"""A switcher over `quick_sides`, as a program: python quick_switch.py RUN_DIR STEPS [RANK COUNT HOST:PORT]"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from longstraw.rollout.topology.command import Command
from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.gathering import split_rendezvous
from longstraw.rollout.topology.run import run_switch
from longstraw.rollout.topology.states import Progress
from megatron.grpo.topology.commands import Commands
from megatron.grpo.topology.config import SwitchConfig
from megatron.grpo.topology.job import LoopJob
from tests.support import quick_sides
from tests.support.ranks import REPOSITORY


class QuickJob:
    """See `longstraw.rollout.topology.stages.Job`. On a Ray cluster, the server is `ray_pair` and nobody generates."""

    def __init__(self, folder: Path, last_step: int, commands: Commands):
        self.folder, self.last_step, self.loop = folder, last_step, LoopJob(commands.config, commands.site, folder / "ready.json")
        self.uses_ray = self.loop.uses_ray

    def read_progress(self) -> Progress:
        done = quick_sides.read_checkpoint(self.folder)["step"]
        return Progress(
            committed=done, exported=done == 0 or (self.folder / f"version-{done}").exists(),
            rolled_out=(self.folder / f"rollouts-{done + 1}").exists(),
        )

    def choose_ports(self, role):
        return self.loop.choose_ports(role)

    def ray_answers(self, ports):
        return self.loop.ray_answers(ports)

    def server_version(self):
        try:
            return json.loads((self.folder / "ready.json").read_text())["weight_version"]
        except FileNotFoundError:
            return None


def main(folder: Path, steps: int, rank: int = 0, count: int = 1, rendezvous: str = "") -> int:
    """The switcher of one host."""

    ray = bool(os.environ.get("QUICK_SWITCH_RAY"))

    def make_commands(site):
        """The real ones, of which Ray's are run."""
        config = SwitchConfig(
            run_dir=str(folder), model="none", train_iters=steps, num_nodes=count, node_rank=rank, rendezvous=rendezvous or None,
            rollout_backend="ray" if ray else "mp",
        )
        return Commands(config=config, site=site, trainer_flags=(), server_flags=(), grace_seconds=2.0, ray_secret="s" * 64)

    def build(site):
        def command(role, step, ports):
            if role == "ray":
                return make_commands(site).build(role, step, ports)
            arguments, environment = [sys.executable, "-I", "-S", quick_sides.__file__, role], dict(os.environ)
            if role == "server" and ray:
                server = make_commands(site).build(role, step, ports)
                return replace(
                    server, arguments=(server.arguments[0], str(REPOSITORY / "tests/support/ray_pair.py"),
                                       str(folder / "ready.json"), str(step - 1)), scratch=(folder / "ready.json",),
                )
            if role == "trainer" and os.environ.get("QUICK_SWITCH_ALONE"):
                arguments += [] if rank == 0 else ["other"]  # ranks that wait instead of a job of torchrun's
            elif role in ("trainer", "exporter") and count > 1:
                launch = [sys.executable, REPOSITORY / "tools/launch.py", "--nproc-per-node", "1", "--failure-seconds", "2"]
                arguments = [*map(str, launch), str(REPOSITORY / "tests/support/quick_ranks.py")]
                environment |= {
                    "NNODES": str(count), "NODE_RANK": str(rank), "MASTER_ADDR": site.leader, "MASTER_PORT": str(ports[0]),
                    "GLOO_SOCKET_IFNAME": site.interface,
                }
            return Command(
                arguments=(*arguments, str(folder), str(step)), log=folder / f"log-{rank}", environment=environment,
                grace_seconds=20.0, scratch=(folder / "ready.json",) if role == "server" else (),
            )

        return command

    quick = {f"{state}_seconds": 60.0 for state in ("training", "exporting", "rollout_up", "generating")}
    quick |= {"draining_seconds": 60.0, "rollout_down_seconds": 60.0, "grace_seconds": 3.0, "rendezvous_seconds": 20.0}
    deadlines = DeadlineConfig(**quick | json.loads(os.environ.get("QUICK_SWITCH", "{}")))
    return run_switch(
        lambda site: QuickJob(folder, steps, make_commands(site)), build, folder / "switch", deadlines, rank=rank, count=count,
        rendezvous=split_rendezvous(rendezvous) if rendezvous else None, fingerprint=str(steps),
    )


if __name__ == "__main__":
    place = [int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]] if len(sys.argv) > 3 else []
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *place))
