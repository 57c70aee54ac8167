"""The pool against reward functions that hang, raise, crash and lie. Process ids are looked up in /proc."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from megatron.grpo.reward_pool import BOOTSTRAP, RewardPool
from megatron.grpo.rewards import RewardConfig, RewardSample

REWARDS = Path(__file__).with_name("sample_rewards.py")
REPOSITORY = Path(__file__).parents[3]
STUCK = 2.0  # seconds until a reward counts as stuck: more than a good one takes, also on a busy machine


def pool_of(*functions, **settings):
    settings = {"reward_timeout": 20.0, "reward_workers": 2} | settings
    return RewardPool(RewardConfig(reward=[f"{REWARDS}:{function}" for function in functions], **settings))


def sample(response, **extra):
    return RewardSample(prompt="p", response=response, answer="a", extra=extra)


def is_running(pid):
    """Whether a process is there and not merely waiting to be reaped by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds=30.0):
    give_up = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < give_up, f"still running: {left}"
        time.sleep(0.02)


def children_of(pid):
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_worker_whose_pool_has_gone_ends_quietly():
    """Also where the pool never read what it sent: closing resets the connection then."""
    ours, theirs = Pipe(duplex=True)
    names, paths = [f"{REWARDS}:misbehave"], [*sys.path, str(REPOSITORY)]
    arguments = [json.dumps(paths), str(theirs.fileno()), str(os.getpid()), json.dumps(names)]
    process = subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP, *arguments], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
    )
    theirs.close()
    assert ours.poll(60)  # "ready" lies there, unread
    ours.close()
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, "")


def test_a_message_that_is_no_text_is_written_out():
    with pool_of("misbehave") as pool:
        result = pool.score([sample("half a character")])[0]
    assert result.status == "error" and "ValueError: \\udcff at " in result.message
    result.message.encode()


@pytest.mark.parametrize("stuck", ["sleep", "hold the interpreter lock", "ignore signals"])
def test_one_stuck_reward_does_not_stop_the_others(stuck):
    """Of 4 samples the second's reward never returns: three are scored, one timed out, its process gone."""
    with pool_of("misbehave", reward_timeout=STUCK) as pool:
        pool.start()
        before = pool.worker_pids()
        began = time.monotonic()
        results = pool.score([sample("fine"), sample(stuck), sample("fine"), sample("fine")])
        assert time.monotonic() - began < 30
        assert [result.status for result in results] == ["ok", "timeout", "ok", "ok"]
        assert [result.value for result in results] == [1.0, None, 1.0, 1.0]
        killed = [pid for pid in before if f"its process {pid} was killed" in results[1].message]
        assert len(killed) == 1 and "--reward-timeout" in results[1].message and "misbehave" in results[1].message
        assert not Path(f"/proc/{killed[0]}").exists()  # reaped as well
        assert [result.status for result in pool.score([sample("fine")] * 3)] == ["ok"] * 3


def test_every_worker_stuck_at_once():
    with pool_of("misbehave", reward_timeout=STUCK) as pool:
        responses = ["sleep", "sleep", "sleep", "fine", "sleep", "fine"]
        statuses = [result.status for result in pool.score([sample(response) for response in responses])]
    assert statuses == ["ok" if response == "fine" else "timeout" for response in responses]


def test_children_of_a_stuck_reward_go_with_it(tmp_path):
    with pool_of("misbehave", reward_timeout=2 * STUCK, reward_workers=1) as pool:
        assert pool.score([sample("start a child", pid_file=str(tmp_path / "pid"))])[0].status == "timeout"
        wait_until_gone([int((tmp_path / "pid").read_text())])


@pytest.mark.parametrize(
    ("response", "status", "message"),
    [
        ("raise", "error", "raised KeyError: 'no such thing' at .*sample_rewards.py:"),
        ("exit", "error", "raised SystemExit"),
        ("crash", "error", r"died \(exit code 3\)"),
        ("close everything, then crash", "error", r"died \(exit code 4\)"),
        ("kill", "error", r"died \(signal 9\)"),
        ("nan", "invalid", "returned nan, not a finite number"),
        ("inf", "invalid", "returned -inf, not a finite number"),
        ("huge", "invalid", "returned inf, not a finite number"),
        ("text", "invalid", "returned a str, not one number"),
        ("none", "invalid", "returned a NoneType, not one number"),
        ("list", "invalid", "returned a list of 2, not one number"),
    ],
)
def test_each_failure_has_a_name_and_the_next_sample_is_scored(response, status, message, pools):
    result, following = pools.score([sample(response), sample("fine")])
    assert (result.value, result.status) == (None, status)
    assert re.search(message, result.message), result.message
    assert (following.value, following.status) == (1.0, "ok")


@pytest.mark.parametrize("response", ["fork and return", "fork and raise", "forge"])
def test_only_the_worker_itself_answers_for_its_sample(response):
    """A forked child that comes back from the function, and messages of another process or sample, count for nothing."""
    with pool_of("misbehave", reward_workers=1) as pool:
        results = pool.score([sample("fine"), sample(response), sample("fine"), sample("raise")])
        assert [result.status for result in results] == ["ok", "ok", "ok", "error"], results
        assert [result.value for result in results[:3]] == [1.0] * 3
        for pid in pool.worker_pids():  # the child is gone, or waits to be reaped
            assert not any(is_running(child) for child in children_of(pid))


@pytest.mark.parametrize(
    ("weights", "total"), [([1e308, 1.0], "inf"), ([-1e308, 1.0], "-inf"), ([1e308, -1e308], "nan")]
)
def test_a_weighted_sum_that_is_not_finite_is_no_reward(weights, total):
    with pool_of("length", "length", reward_weights=weights, reward_workers=1) as pool:
        result, following = pool.score([sample("x" * 10), sample("")])
    assert (result.value, result.status, result.components) == (None, "invalid", ())
    assert f"add up to {total}, not to a finite number" in result.message
    assert f"sample_rewards.py:length 10 x {weights[0]:g}" in result.message
    assert (following.value, following.status) == (0.0, "ok")


@pytest.fixture(scope="module")
def pools():
    with pool_of("misbehave") as pool:
        yield pool


def test_results_keep_the_order_of_the_samples_and_integers_are_numbers(pools):
    with pool_of("length", reward_workers=3) as pool:
        results = pool.score([sample("x" * length) for length in range(50)])
        assert [result.value for result in results] == [float(length) for length in range(50)]
        assert pool.score([]) == []
    assert pools.score([sample("bool")])[0].value == 1.0


def test_weighted_sum_with_its_parts():
    with pool_of("length", "misbehave", reward_weights=[0.5, -2.0]) as pool:
        (result,) = pool.score([sample("four")])
        assert result.value == 0.5 * 4 - 2.0 * 1
        assert result.components == (4.0, 1.0)
        assert [failed.status for failed in pool.score([sample("raise"), sample("nan")])] == ["error", "invalid"]


def test_a_timeout_names_the_function_that_was_running():
    with pool_of("length", "misbehave", reward_timeout=STUCK) as pool:
        assert "sample_rewards.py:misbehave had not returned" in pool.score([sample("sleep")])[0].message


def test_signals_work_in_a_reward():
    with pool_of("alarm") as pool:
        assert pool.score([sample("")])[0].value == 1.0
    with RewardPool(RewardConfig(reward=["math_verify"], reward_workers=1)) as pool:
        (result,) = pool.score([RewardSample(prompt="", response=r"\boxed{0.5}", answer=r"\frac{1}{2}")])
        assert result.value == 1.0, result


def test_workers_are_outside_the_trainers_job(monkeypatch):
    """No rank variables, no open sockets of the trainer, none of its imports: not even its main module."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    for name in [*names, "MY_OWN_SETTING"]:
        monkeypatch.setenv(name, "1")
    with pool_of("environment") as pool:
        assert [result.value for result in pool.score([sample(name) for name in names])] == [0.0] * len(names)
        assert pool.score([sample("MY_OWN_SETTING")])[0].value == 1.0
    with pool_of("loaded") as pool:
        modules = ["torch", "pytest", "megatron.core", "transformers"]
        assert [result.value for result in pool.score([sample(name) for name in modules])] == [0.0] * len(modules)
        assert pool.score([sample("megatron.grpo.reward_worker")])[0].value == 1.0


def test_an_unknown_reward_is_refused_at_start_and_leaves_no_process():
    before = children_of(os.getpid())
    pool = pool_of("no_such_function")
    with pytest.raises(ValueError, match="has no `no_such_function`"):
        pool.start()
    assert children_of(os.getpid()) == before


def test_closing_leaves_no_child():
    before = children_of(os.getpid())
    pool = pool_of("misbehave", reward_timeout=0.5)
    assert children_of(os.getpid()) == before  # nothing starts before it is needed
    pool.score([sample("sleep"), sample("fine")])
    assert children_of(os.getpid()) > before
    pool.close()
    assert children_of(os.getpid()) == before and pool.worker_pids() == []
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([sample("fine")])


def test_a_forgotten_pool_is_closed_by_the_garbage_collector():
    before = children_of(os.getpid())
    pool = pool_of("length")
    pool.start()
    del pool
    assert children_of(os.getpid()) == before


def test_a_worker_that_died_while_idle_is_replaced(pools):
    pools.start()
    for pid in pools.worker_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(pools.worker_pids())
    assert [result.status for result in pools.score([sample("fine")] * 4)] == ["ok"] * 4


def test_sigterm_for_the_whole_job_leaves_scoring_alive(pools):
    pools.start()
    before = pools.worker_pids()
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    assert [result.status for result in pools.score([sample("fine")] * 4)] == ["ok"] * 4
    assert pools.worker_pids() == before


@pytest.mark.parametrize("responses", [["sleep", "hold the interpreter lock"], []], ids=["while scoring", "while idle"])
def test_a_killed_trainer_leaves_no_orphan(responses):
    program = f"""
import sys, threading, time
from megatron.grpo.reward_pool import RewardPool
from megatron.grpo.rewards import RewardConfig, RewardSample
pool = RewardPool(RewardConfig(reward=["{REWARDS}:misbehave"], reward_timeout=1000.0, reward_workers=2))
pool.start()
print(*pool.worker_pids(), flush=True)
pool.score([RewardSample(prompt="", response=response, answer="") for response in {responses!r}])
time.sleep(1000)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2 and all(is_running(pid) for pid in pids)
        time.sleep(0.3)  # let the rewards get stuck
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    wait_until_gone(pids)
