"""A Slurm of one node in a folder: munge, controller and node daemon, with a configuration of their own. Needs root.

Debian's packages are installed where they are missing and apt can.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONFIGURATION = """
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=tiny Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def explain_absence() -> str:
    """Why there can be no Slurm here, after trying to install it; "" where there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    if all(map(shutil.which, PROGRAMS)):
        return ""
    if shutil.which("apt-get") is None:
        return "Slurm is not installed, and there is no apt-get to install it with"
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240,
                              env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    return "" if all(map(shutil.which, PROGRAMS)) else f"apt-get could not install slurm-wlm and munge: {done.stderr[-300:]}"


class Slurm:
    """A cluster of one node, this machine."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [probe.getsockname()[1] for probe in probes]
        for probe in probes:
            probe.close()
        cores, host = len(os.sched_getaffinity(0)), socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, ports=ports, cores=cores))
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        own = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")]
        self._start("munged", "--foreground", "--force", *own)
        self.wait_until(lambda: (folder / "munge.socket").exists(), "munge")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        self.wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T", check=False), "an idle node")

    def _start(self, *command: str) -> None:
        output = open(self.folder / f"{command[0]}.output", "wb")
        with output:
            self.daemons.append(subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
            ))

    def ask(self, *command: str, check: bool = True) -> str:
        """The output of one of Slurm's commands."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=check, timeout=30
        ).stdout

    def wait_until(self, condition, what: str, seconds: float = 60) -> None:
        """Until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.output"))
            assert time.monotonic() < deadline, f"{what} did not come\n{logs}"
            time.sleep(0.2)

    def state(self, job: str) -> str:
        """A job's state, as scontrol has it also after its end."""
        words = self.ask("scontrol", "-o", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def start_again(self, job: str, seconds: float = 60) -> None:
        """Start a job that is queued again now, not when Slurm would.

        Not within two seconds of its requeue: the node has revoked what was signed before that second, and would fail the job.
        """
        self.wait_until(lambda: self.state(job) == "PENDING", "the job in the queue", seconds)
        time.sleep(2.5)
        self.wait_until(lambda: self._ask_to_start(job), "the job's next start", seconds)

    def _ask_to_start(self, job: str) -> bool:
        if self.state(job) == "PENDING":
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
        return self.state(job) != "PENDING"

    def close(self) -> None:
        """End the jobs, then the daemons."""
        self.ask("scancel", "--signal=KILL", "--user=root", check=False)
        self.ask("scancel", "--user=root", check=False)
        deadline = time.monotonic() + 10
        while self.ask("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
