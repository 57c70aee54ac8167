"""Trains and generates in turn on one set of devices: a vLLM engine rolls a step out and ends, then Megatron trains the
step and ends.

    tools/switch_topology.sh --run-dir runs/loop --model HF_FOLDER --train-iters 10 --nproc-per-node 2 \\
        --rollout-tensor-parallel-size 2 -- TRAINER FLAGS -- ENGINE FLAGS

TRAINER FLAGS are those of megatron.grpo.train, for trainer and generator alike; ENGINE FLAGS those of
longstraw.rollout.vllm_server. Those that the switcher sets itself are refused there.

Left out: restarting itself. Exit statuses: 0 when the last step's weights are written; 75 when stopped by a signal with
everything saved; 2 for flags that cannot be run; 1 for anything else, after one sentence. Whatever the status, nothing
is left running, and the same command goes on from there.
"""

import argparse
import hashlib
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from longstraw.rollout.topology.channel import read_token
from longstraw.rollout.topology.config import DeadlineConfig
from longstraw.rollout.topology.flags import add_flags, build_config
from longstraw.rollout.topology.gathering import split_rendezvous
from longstraw.rollout.topology.run import FAILED, REFUSED, STOPPED, Site, run_switch
from megatron.grpo.topology.commands import SERVER_OWNED, TRAINER_OWNED, Commands, check_flags, check_server_flags
from megatron.grpo.topology.config import SwitchConfig
from megatron.grpo.topology.job import LoopJob
from megatron.grpo.topology.plan import print_plan
from megatron.grpo.topology.trainer_check import CheckFailed, list_refusals


def split_words(argv: list[str]) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """The switcher's words, the trainer's and the engine's: two `--` stand between them. Raises ValueError for a
    third."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    if len(parts) > 3:
        raise ValueError("a third -- on the command line: switcher's flags -- trainer's flags -- engine's flags")
    parts += [[]] * (3 - len(parts))
    return parts[0], tuple(parts[1]), tuple(parts[2])


def parse_arguments(argv: list[str]) -> tuple[SwitchConfig, DeadlineConfig, tuple[str, ...], tuple[str, ...]]:
    """The command line as configs and the two programs' flags; exits with 2 and a sentence where it cannot be run."""
    parser = argparse.ArgumentParser(
        prog="switch_topology", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="switch_topology.sh [flags] -- [flags of megatron.grpo.train] -- [flags of longstraw.rollout.vllm_server]",
    )
    add_flags(parser, SwitchConfig, "run")
    add_flags(parser, DeadlineConfig, "deadlines")
    try:
        own, trainer_flags, server_flags = split_words(argv)
        namespace = parser.parse_args(own)
        config, deadlines = build_config(SwitchConfig, namespace), build_config(DeadlineConfig, namespace)
        check_flags(trainer_flags, TRAINER_OWNED, "trainer")
        check_flags(server_flags, SERVER_OWNED, "engine")
        if config.rendezvous:
            split_rendezvous(config.rendezvous)
        warning = check_server_flags(config, server_flags, trainer_flags)
        if warning:
            print(f"switch_topology: warning: {warning}", file=sys.stderr)
    except ValueError as error:
        parser.error(str(error))
    return config, deadlines, trainer_flags, server_flags


def check_trainer(commands: Commands, *, elsewhere: bool) -> bool:
    """Whether the trainer would take its flags; what it has against them is on standard error then. A signal meanwhile
    ends this process, with nothing started."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    print("switch_topology: checking the trainer's flags", file=sys.stderr, flush=True)
    sentences = list_refusals(commands, elsewhere=elsewhere)
    for sentence in sentences:
        print(f"switch_topology: error: the trainer refuses its flags: {sentence}", file=sys.stderr, flush=True)
    return not sentences


def fingerprint(config: SwitchConfig, *others) -> str:
    """Of everything that must be the same on every host."""
    same = {name: value for name, value in asdict(config).items() if name != "node_rank"}
    return hashlib.sha256(json.dumps([same, *others], sort_keys=True).encode()).hexdigest()


def main(argv: list[str]) -> int:
    """The program; returns the exit status."""
    config, deadlines, trainer_flags, server_flags = parse_arguments(argv)

    def make_commands(site: Site, *, planned: bool = config.plan) -> Commands:
        token = read_token(config.switch / "token", create=site.rank == 0 and not planned) or b""
        secret = hashlib.sha256(b"ray" + token).hexdigest()
        return Commands(
            config=config, site=site, trainer_flags=trainer_flags, server_flags=server_flags,
            grace_seconds=deadlines.grace_seconds, ray_secret=secret, planned=planned,
        )

    site = Site(rank=config.node_rank, count=config.num_nodes)
    if not check_trainer(make_commands(site, planned=True), elsewhere=config.plan):
        return REFUSED
    if config.plan:
        print_plan(config, make_commands, deadlines)
        return 0
    config.switch.mkdir(parents=True, exist_ok=True)
    return run_switch(
        lambda site: LoopJob(config, site, make_commands(site).ready_file), lambda site: make_commands(site).build,
        Path(config.switch), deadlines, rank=config.node_rank, count=config.num_nodes,
        rendezvous=split_rendezvous(config.rendezvous) if config.rendezvous else None,
        fingerprint=fingerprint(config, asdict(deadlines), trainer_flags, server_flags),
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CheckFailed as failure:
        print(f"switch_topology: {failure}", file=sys.stderr)
        sys.exit(FAILED)
