"""tools/launch: how a launch starts, fails, is stopped and cleans up, on real torchrun ranks.

Each launched process carries a mark in its environment, so that "nothing is left" can be asked of the whole machine.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import launch  # noqa: E402

PYTHON_RANK = "import os, signal, subprocess, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
SAVE_ON_SIGTERM = PYTHON_RANK + """
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
Path(f"started-{rank}").touch()
while not received:
    time.sleep(0.05)
time.sleep(1)
Path(f"saved-{rank}").write_text(str(len(received)))
"""
IGNORE_SIGTERM = PYTHON_RANK + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"started-{rank}").touch()
time.sleep(120)
"""
# The peer's sockets stay open in a process it leaves behind, so rank 0 waits in the collective for good; it catches
# SIGTERM as a rank that wants to save would.
STUCK_COLLECTIVE = PYTHON_RANK + """
import torch, torch.distributed as dist
signal.signal(signal.SIGTERM, lambda *_: None)
dist.init_process_group("gloo")
dist.barrier()
if rank == 1:
    if os.fork() == 0:
        time.sleep(120)
    Path("failed").write_text(str(time.time()))
    os._exit(3)
Path("started-0").touch()
dist.all_reduce(torch.ones(1))
"""
ALL_REDUCE = PYTHON_RANK + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
Path(f"{sys.argv[1]}-{rank}").write_text(f"{int(total)} {sys.argv[2]}")
"""


class Ranks:
    """Starts launches in one folder and knows which of their processes are alive."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.launches: list[subprocess.Popen] = []

    def start(self, program: str, *arguments: str, ranks: int = 2, flags: tuple[str, ...] = (), **environ: str):
        script = self.folder / f"program {len(self.launches)}.py"
        script.write_text(program)
        self.launches.append(subprocess.Popen(
            [sys.executable, ROOT / "tools/launch.py", "--nproc-per-node", str(ranks), *flags, script, *arguments],
            cwd=self.folder, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"LAUNCH_TEST_MARK": self.mark, "CUDA_VISIBLE_DEVICES": ""} | environ))
        return self.launches[-1]

    def wait_for(self, *names: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} did not appear"
            time.sleep(0.05)

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LAUNCH_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture
def ranks(tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    started = Ranks(folder)
    yield started
    for process in started.alive():
        process.kill()


@pytest.mark.ranks(seconds=40)
def test_two_launches_at_once_both_start(ranks):
    launches = [ranks.start(ALL_REDUCE, name, "an argument", ranks=1) for name in ("first", "second")]
    for process in launches:
        assert process.wait(100) == 0, process.stderr.read()
    for name in ("first-0", "second-0"):
        assert (ranks.folder / name).read_text() == "1 an argument"
    assert ranks.alive() == []


@pytest.mark.ranks
def test_two_machines_make_one_job(ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launches = [ranks.start(ALL_REDUCE, "node", "x", ranks=1, NNODES="2", NODE_RANK=node, MASTER_ADDR="127.0.0.1",
                            MASTER_PORT=port) for node in ("0", "1")]
    for process in launches:
        assert process.wait(100) == 0, process.stderr.read()
    assert [(ranks.folder / f"node-{rank}").read_text() for rank in (0, 1)] == ["2 x", "2 x"]


@pytest.mark.ranks
def test_each_rank_but_the_first_has_a_log_of_its_own(ranks):
    speak = PYTHON_RANK + "print(f'this is {rank}', flush=True); print(f'error {rank}', file=sys.stderr)"
    process = ranks.start(speak, flags=("--log-dir", "some logs"))
    assert process.wait(60) == 0
    assert (ranks.folder / "some logs/rank-00001.log").read_text() == "this is 1\nerror 1\n"
    shown = process.stderr.read()
    assert "error 0" in shown and "error 1" not in shown and len(list((ranks.folder / "some logs").iterdir())) == 1


@pytest.mark.ranks
def test_one_dead_rank_ends_the_launch_within_seconds(ranks):
    process = ranks.start(STUCK_COLLECTIVE, flags=("--failure-seconds", "3"))
    status = process.wait(100)
    waited = time.time() - float((ranks.folder / "failed").read_text())
    assert status == 3
    assert waited < 10
    assert ranks.alive() == []
    assert "rank 1 exited with 3" in process.stderr.read()


@pytest.mark.ranks
def test_a_killed_rank_is_named_with_its_signal(ranks):
    process = ranks.start(PYTHON_RANK + "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(120)")
    assert process.wait(60) == 128 + signal.SIGKILL
    assert "rank 0 was ended by SIGKILL" in process.stderr.read()
    assert ranks.alive() == []


@pytest.mark.ranks
def test_a_signal_reaches_each_rank_once_and_waits_for_the_save(ranks):
    process = ranks.start(SAVE_ON_SIGTERM)
    ranks.wait_for("started-0", "started-1")
    process.terminate()
    assert process.wait(30) == 0, process.stderr.read()
    assert [(ranks.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert ranks.alive() == []


@pytest.mark.ranks
def test_ranks_that_do_not_obey_are_killed_after_the_grace_period(ranks):
    process = ranks.start(IGNORE_SIGTERM, flags=("--grace-seconds", "1"))
    ranks.wait_for("started-0", "started-1")
    asked = time.monotonic()
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert 1 <= time.monotonic() - asked < 8
    assert ranks.alive() == []


@pytest.mark.ranks
def test_a_second_signal_ends_the_wait(ranks):
    process = ranks.start(IGNORE_SIGTERM, flags=("--grace-seconds", "100"))
    ranks.wait_for("started-0", "started-1")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT
    assert ranks.alive() == []


@pytest.mark.ranks
def test_a_signal_before_the_ranks_exist_ends_the_launch(ranks):
    process = ranks.start(IGNORE_SIGTERM)
    deadline = time.monotonic() + 30
    while len(ranks.alive()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) != 0
    assert ranks.alive() == []


@pytest.mark.ranks
def test_killing_the_launcher_lets_the_ranks_save_and_ends_them(ranks):
    process = ranks.start(SAVE_ON_SIGTERM)
    ranks.wait_for("started-0", "started-1")
    process.kill()
    deadline = time.monotonic() + 20
    while ranks.alive():
        assert time.monotonic() < deadline, ranks.alive()
        time.sleep(0.1)
    assert [(ranks.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


@pytest.mark.ranks
def test_what_a_rank_leaves_behind_is_killed_after_success(ranks):
    process = ranks.start(PYTHON_RANK + "subprocess.Popen(['sleep', '120'], start_new_session=True)", ranks=1)
    assert process.wait(60) == 0
    assert ranks.alive() == []
    assert "left behind" in process.stderr.read()


def test_the_hardware_sets_only_what_the_caller_has_not():
    assert launch.choose_environment({}, ranks=2, gpus=0, cores=2) == {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    assert launch.choose_environment({}, ranks=8, gpus=8, cores=128) == {"OMP_NUM_THREADS": "8",
                                                                         "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert launch.choose_environment({"OMP_NUM_THREADS": "5"}, ranks=1, gpus=0, cores=64)["OMP_NUM_THREADS"] == "5"
    assert launch.choose_environment({}, ranks=4, gpus=0, cores=2)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("visible, count", [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_visible_gpus_are_counted(visible, count):
    assert launch.count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_one_machine_asks_the_system_for_a_port():
    flags = launch.choose_rendezvous({})
    assert "127.0.0.1:0" in flags and "--master-port" not in flags
    assert flags != launch.choose_rendezvous({}), "two launches must not share a rendezvous id"


@pytest.mark.parametrize("environ, message", [
    ({"NNODES": "4", "MASTER_ADDR": "a"}, "missing here: NODE_RANK, MASTER_PORT"),
    ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "NODE_RANK=2"),
    ({"NNODES": "0", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "NNODES=0: .* at least 1"),
    ({"NNODES": "-1"}, "NNODES=-1: .* at least 1"),
    ({"NNODES": "abc"}, "^NNODES=abc is not a whole number$"),
    ({"NNODES": ""}, "^NNODES= is not a whole number$"),
    ({"NNODES": "2", "NODE_RANK": "a", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "^NODE_RANK=a is not a whole number$"),
    ({"NNODES": "2", "NODE_RANK": "-1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "NODE_RANK=-1"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "^MASTER_PORT=x is not a whole number$"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port"),
])
def test_an_incomplete_machine_list_is_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        launch.choose_rendezvous(environ)


def test_more_ranks_than_gpus_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="more ranks than this machine has GPUs"):
        launch.main(["--nproc-per-node", "3", "program.py"])


@pytest.mark.parametrize("argv", [
    ["--nproc-per-node", "0", "x.py"], ["--grace-seconds", "-1", "x.py"], ["--grace-seconds", "nan", "x.py"],
    ["--failure-seconds", "inf", "x.py"], [],
])
def test_bad_flags_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as refused:
        launch.parse_arguments(argv)
    assert refused.value.code == 2


def test_the_programs_own_flags_are_left_to_it():
    args = launch.parse_arguments(["--nproc-per-node", "2", "-m", "pkg.train", "--nproc-per-node", "9", "-m", "x"])
    assert args.nproc_per_node == 2 and args.module and args.program == "pkg.train"
    assert args.arguments == ["--nproc-per-node", "9", "-m", "x"]
