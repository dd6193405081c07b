"""A real Slurm on `Hosts`: munged, slurmctld here, a slurmd on every host, without systemd and without accounting.

    with Hosts(2) as hosts, Slurm(hosts, tmp_path) as slurm:
        slurm.run("sbatch", "--wrap", "srun hostname")

Partition `debug` (the default) is preempted by `high`: its jobs are requeued, after SIGTERM and `grace_s` seconds.
A requeued job would wait two minutes: `start_now` lets it go on.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, skip_without_namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
KILL_WAIT_S = 15
"""Between SIGTERM and SIGKILL."""


def skip_without_slurm() -> None:
    """Skip the test, saying why, where Slurm cannot be started."""
    skip_without_namespaces()
    os.environ["PATH"] += "" if "/usr/sbin" in os.environ["PATH"].split(":") else ":/usr/sbin"
    if lacking := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"Slurm is not installed (no {', '.join(lacking)}): apt-get install slurmctld slurmd munge")


class Slurm:
    """The cluster; `environment` is what its commands need."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        cpus: int = 4,
        gpus: int = 0,
        features: Sequence[str] = (),
        grace_s: int = 0,
    ) -> None:
        """`folder` for its state and logs. `features`: one a host (node class). `gpus` are fake devices."""
        self.hosts, self.folder = hosts, folder
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._daemons: list[subprocess.Popen[str]] = []
        for name in ("state", "log", "munge", "dev", *(f"spool.{name}" for name in hosts.names)):
            (folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        self._write_conf(cpus, gpus, list(features) or [""] * len(hosts), grace_s)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, *argv: str, timeout_s: float = 30.0) -> str:
        """What a command of Slurm's (or one that calls them) prints. Raises RuntimeError with what it said."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """`scontrol show job` as a mapping (JobState, Reason, Restarts, …)."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait(self, job: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until the job is in one of the states. Raises TimeoutError with what it is instead."""
        deadline = time.monotonic() + timeout_s
        while (found := self.job(job))["JobState"] not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {found['JobState']} ({found['Reason']}), not {' or '.join(states)}")
            time.sleep(0.2)
        return found

    def start_now(self, job: str, timeout_s: float = 300.0) -> None:
        """Wait until the job has been requeued, and spare it the two minutes that it would wait then."""
        deadline = time.monotonic() + timeout_s
        while (found := self.job(job))["JobState"] != "PENDING" or found["Reason"] != "BeginTime":
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {found['JobState']} ({found['Reason']}), not queued again")
            time.sleep(0.2)
        time.sleep(2)  # a job that starts again within the second in which it ended is refused: its credential is void
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def close(self) -> None:
        """End the jobs, then the daemons."""
        try:
            if self._daemons and self._daemons[-1].poll() is None:
                self.run("scancel", "--full", "-u", "root")
                self._until(lambda: not self.run("squeue", "-h", "-t", "running,completing"), KILL_WAIT_S + 30)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []

    def _start(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        place = self.folder / "munge"
        files = [f"--{name}-file={place / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon(["munged", "--foreground", "--force", "--num-threads=2", f"--socket={place / 'socket'}", *files])
        self._until((place / "socket").exists, 10)
        self._daemon(["slurmctld", "-D", "-c", "-f", str(self.conf)])
        for host, name in enumerate(self.hosts.names):
            self._daemon(self.hosts.command(host, ["slurmd", "-D", "-c", "-f", str(self.conf), "-N", name]))
        self._until(
            lambda: len(self.run("sinfo", "-hN", "-t", "idle", "-p", "debug").split("\n")) > len(self.hosts), 30
        )

    def _daemon(self, argv: list[str]) -> None:
        log = (self.folder / "log" / "daemons").open("a", encoding="utf-8")
        with log:
            self._daemons.append(subprocess.Popen(argv, env=self.environment, stdout=log, stderr=log, text=True))

    def _until(self, good: Callable[[], object], seconds: float) -> None:
        deadline, why = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            try:
                if good():
                    return
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                why = str(error)
            time.sleep(0.1)
        logs = "\n".join(f"== {p.name}\n{p.read_text()[-2000:]}" for p in sorted((self.folder / "log").iterdir()))
        raise RuntimeError(f"Slurm is not ready after {seconds:.0f} s: {why}\n{logs}")

    def _write_conf(self, cpus: int, gpus: int, features: list[str], grace_s: int) -> None:
        here, run, port = os.uname().nodename, self.folder, 16000 + 2 * self.hosts.network
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{here}({self.hosts.gateway})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={run}/munge/socket",
            "SlurmctldPort": port,
            "SlurmdPort": port + 1,
            "SlurmctldPidFile": f"{run}/slurmctld.pid",
            "SlurmdPidFile": f"{run}/slurmd.%n.pid",
            "StateSaveLocation": f"{run}/state",
            "SlurmdSpoolDir": f"{run}/spool.%n",
            "SlurmctldLogFile": f"{run}/log/slurmctld",
            "SlurmdLogFile": f"{run}/log/slurmd.%n",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=1,sched_min_interval=100000",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "JobRequeue": 1,
            "KillWait": KILL_WAIT_S,
            "OverTimeLimit": 0,
            "MinJobAge": 3600,
            "FirstJobId": int(time.time()) % 60_000_000 + 1,
            "TCPTimeout": 5,
            "GresTypes": "gpu",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        machine = f"CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=16000"
        for name, address, feature in zip(self.hosts.names, self.hosts.addresses, features, strict=True):
            extra = (f" Gres=gpu:{gpus}" if gpus else "") + (f" Feature={feature}" if feature else "")
            lines.append(f"NodeName={name} NodeAddr={address} NodeHostname={name} {machine}{extra} State=UNKNOWN")
        shared = "Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO"
        lines.append(f"PartitionName=debug {shared} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}")
        lines.append(f"PartitionName=high {shared} PriorityTier=10 PreemptMode=OFF")
        self.conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for index in range(gpus):
            os.mknod(run / "dev" / f"gpu{index}", 0o20666, os.makedev(1, 3))
        fake = f"Name=gpu File={run}/dev/gpu[0-{gpus - 1}]\n" if gpus else ""
        (run / "gres.conf").write_text(fake, encoding="utf-8")
        (run / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n", encoding="utf-8")
