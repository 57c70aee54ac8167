"""tools/switch_topology over the real vLLM and Megatron: a step with a killed engine, and, with --long, everything else
that may be killed, ten switches in a row, LoGRA's updates at two engine ranks, two loops at once, a Slurm job.
"""

import shlex
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.ranks import REPOSITORY
from tests.support.slurm import Slurm, explain_absence
from tests.support.real_loops import ADAM, LOGRA, RealLoop, make_inputs, trainer_flags

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def make(inputs, tmp_path):
    made = []

    def make_loop(steps: int, name: str = "run", **settings) -> RealLoop:
        made.append(RealLoop(tmp_path / name, inputs, steps, **settings))
        return made[-1]

    yield make_loop
    for loop in made:
        loop.end()


def train_at_once(loop: RealLoop, inputs, trainer: list[str]) -> dict[str, str]:
    """The last weights of a trainer that takes all of a loop's steps in one life, from the loop's rollouts."""
    folder = loop.folder / "at_once"
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools/launch.py", "--nproc-per-node", "2", "-m", "megatron.grpo.train",
         *trainer_flags(inputs, trainer), "--train-iters", str(loop.steps), "--rollouts-from", loop.folder / "rollouts",
         "--output-dir", folder / "train", "--weight-sync", "full", "--weight-sync-dir", folder / "weights"],
        env=loop.environment, capture_output=True, text=True, timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return loop.weights(loop.steps, folder / "weights")


def test_an_engine_killed_while_it_generates_costs_no_step(make):
    loop = make(1)
    loop.start()
    loop.wait_for("enter", "generating", 1, 900)
    port = [c.laddr.port for c in loop.find("server", "main").net_connections() if c.status == "LISTEN"]
    loop.kill("server main")
    assert loop.wait(1500) == 0, loop.output.read_text()
    failed = [line for line in loop.lines() if line["event"] == "failed"]
    assert [line["state"] for line in failed] == ["generating"]
    assert loop.steps_recorded() == [1] and len(loop.rollouts()) == 1 and loop.weights(1)
    listening = {c.laddr.port for c in psutil.net_connections() if c.status == "LISTEN"}
    assert port and not listening & set(port)
    loop.check_nothing_left()


KILLS = {
    "rollout_up": ["server main", "server keeper", "switcher"],
    "generating": ["server VLLM::Worker_TP1", "generator main", "generator keeper", "switcher"],
    "rollout_down": ["server main", "switcher"],
    "training": ["trainer main", "trainer torch.distributed.run", "trainer launch_rank.py"],
    "training again": ["trainer python -m megatron.grpo.train", "trainer keeper", "switcher", "switcher,trainer keeper"],
    "saving": ["trainer main", "switcher"],
    "draining": ["trainer python -m megatron.grpo.train", "switcher"],
}
"""State, or the part of training in which the checkpoint is half-written -> what is killed in it, one at each step."""


@pytest.mark.long
@pytest.mark.parametrize("state", KILLS)
def test_kill_9_of_anything_in_any_state(make, inputs, state):
    loop = make(len(KILLS[state]), tensor_parallel=2)
    seen: dict[str, str] = {}
    loop.start()
    for step, targets in enumerate(KILLS[state], start=1):
        loop.wait_for("enter", {"saving": "training"}.get(state, state.split()[0]), step, 1500)
        if state == "saving":
            loop.wait_until(lambda: list(loop.folder.glob("checkpoints/*.partial")), "a half-written checkpoint", 900)
        killed = loop.try_to_kill(*targets.split(","), seconds=60)
        print(f"step {step}, {state}: {targets} {'killed' if killed else 'was not there'}", flush=True)
        seen |= loop.rollouts()
        if "switcher" in targets:
            loop.wait_for_nothing()
            loop.start()
    assert loop.wait(1500) == 0, loop.output.read_text()
    assert loop.steps_recorded() == list(range(1, loop.steps + 1))
    assert seen.items() <= loop.rollouts().items() and len(loop.rollouts()) == loop.steps
    assert loop.weights(loop.steps) == train_at_once(loop, inputs, ADAM)
    loop.check_nothing_left()


@pytest.mark.long
def test_ten_switches_in_a_row_with_updates_and_whole_weights(make, inputs):
    trainer = [*LOGRA, "--weight-sync-full-interval", "3"]
    loop = make(10, tensor_parallel=2, sync="delta", trainer=trainer)
    loop.start()
    assert loop.wait(3600) == 0, loop.output.read_text()
    emptied = [line for line in loop.lines() if line.get("state") in ("draining", "rollout_down") and line["event"] == "done"]
    assert len(emptied) == 20 and all(line["memory"]["node-0"]["resident_bytes"] == 0 for line in emptied)
    own = [line["memory"]["switcher"]["resident_bytes"] for line in emptied]
    print("the switcher's memory after each switch:", [line["memory"]["switcher"] for line in emptied], flush=True)
    assert max(own[2:]) <= 1.01 * own[2], own
    loop.check_nothing_left()


@pytest.mark.long
def test_two_loops_at_once(make):
    loops = [make(2, name) for name in ("first", "second")]
    for loop in loops:
        loop.start()
    for loop in loops:
        assert loop.wait(1800) == 0, loop.output.read_text()
        assert loop.steps_recorded() == [1, 2]
        loop.check_nothing_left()


@pytest.mark.long
def test_the_loop_as_a_slurm_job_is_stopped_in_training_queued_again_and_finishes(make, tmp_path):
    absence = explain_absence()
    if absence:
        pytest.skip(f"NOT TESTED: the loop under Slurm: {absence}")
    loop, cluster = make(2), Slurm(tmp_path / "slurm")
    try:
        script, log = tmp_path / "job.sbatch", tmp_path / "job.log"
        command = shlex.join([str(REPOSITORY / "tools/slurm_requeue.sh"), *map(str, loop.command)])
        script.write_text(f"#!/bin/bash\n#SBATCH --time=60 --requeue --open-mode=append --output={log}\nexec {command}\n")
        job = cluster.ask("sbatch", "--parsable", f"--export=ALL,PYTHONPATH={REPOSITORY},OMP_NUM_THREADS=1", str(script)).strip()
        cluster.wait_until(lambda: any(line.get("state") == "training" for line in loop.lines()), "training", 1500)
        time.sleep(15)  # somewhere in the step
        cluster.ask("scancel", "--signal=TERM", job)  # as --signal does ahead of the time limit
        cluster.wait_until(lambda: log.exists() and "queued again" in log.read_text(), "the requeue", 300)
        kept = loop.rollouts()
        cluster.start_again(job)
        cluster.wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "the end of the job", 3000)
        assert cluster.state(job) == "COMPLETED", log.read_text()
        assert kept.items() <= loop.rollouts().items() and loop.steps_recorded() == [1, 2]
        assert list(loop.marked()) == []
    finally:
        cluster.close()
