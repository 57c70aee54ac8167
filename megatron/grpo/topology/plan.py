"""Prints what a switcher would run, state by state and host by host, without running any of it."""

import shlex
from collections.abc import Callable
from pathlib import Path

from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.gathering import split_rendezvous
from longstraw.rollout.topology.run import LOOPBACK, Site
from longstraw.rollout.topology.states import State
from megatron.grpo.topology.commands import RAY_PORTS, ROOT, Commands
from megatron.grpo.topology.config import SwitchConfig

PLANNED_STEP = 1
STARTED = {
    State.ROLLOUT_UP: ("ray", "server"),
    State.GENERATING: ("generator",),
    State.ROLLOUT_DOWN: (),
    State.TRAINING: ("trainer",),
    State.EXPORTING: (),
    State.DRAINING: (),
}
"""State -> roles that start in it, in the order of a step."""

HAPPENS = {
    State.ROLLOUT_UP: "until the engine answers with the weights of the step before",
    State.GENERATING: "until the step's rollouts are in the store",
    State.ROLLOUT_DOWN: "the engine ends; every device is seen empty",
    State.TRAINING: "until the step's checkpoint is the latest",
    State.EXPORTING: "until the step's weights lie whole in the sync folder",
    State.DRAINING: "the trainer ends; every device is seen empty",
}
SHOWN = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "RAY_ADDRESS", "VLLM_HOST_IP")
"""Variables that are shown before a command; the others are the switcher's own."""


def print_plan(config: SwitchConfig, make_commands: Callable[[Site], Commands], deadlines: DeadlineConfig) -> None:
    """The commands of the first step on every host; ports, which the system gives when it runs, are shown as PORT."""
    leader = split_rendezvous(config.rendezvous)[0] if config.rendezvous else LOOPBACK
    sites = [
        Site(rank=rank, count=config.num_nodes, leader=leader, address=leader if rank == 0 else f"ADDRESS_{rank}", interface="")
        for rank in range(config.num_nodes)
    ]
    devices = config.num_nodes * config.nproc_per_node
    print(f"{config.num_nodes} x {config.nproc_per_node} = {devices} devices. Rollout: tensor parallel "
          f"{config.rollout_tensor_parallel_size} x pipeline parallel {config.rollout_pipeline_parallel_size}. Weight sync: "
          f"{config.weight_sync}.")
    for state, roles in STARTED.items():
        print(f"\n{state.value}: {HAPPENS[state]} (at most {deadlines.of(state):g} s)")
        for role in roles:
            everywhere = role in ("trainer", "ray")
            if role == "ray" and not config.uses_ray:
                continue
            for site in sites if everywhere else sites[:1]:
                ports = tuple(range(1, len(RAY_PORTS) + 1))
                command = make_commands(site).build(role, PLANNED_STEP, ports)
                print(f"  node {site.rank}, {role}:\n    {show_command(command, ports)}")


def show_command(command, ports: tuple[int, ...]) -> str:
    """A command as a shell takes it, from the project's folder, with PORT_n for the ports to come."""
    names = {str(port): f"PORT_{port}" for port in ports}
    variables = {name: command.environment[name] for name in SHOWN if name in command.environment}
    if "MASTER_PORT" in variables:
        variables["MASTER_PORT"] = names[variables["MASTER_PORT"]]
    if "RAY_ADDRESS" in variables:
        variables["RAY_ADDRESS"] = _name_port(variables["RAY_ADDRESS"], names)
    words, previous = [], ""
    for word in command.arguments:
        shown = names.get(word, word) if previous.endswith("-port") or previous == "--port" else word
        shown = _name_port(shown, names) if previous == "--address" else shown
        words.append(_shorten(shown))
        previous = word
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)])


def _name_port(address: str, names: dict[str, str]) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{names.get(port, port)}"


def _shorten(word: str) -> str:
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else word
