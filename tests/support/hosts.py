"""Simulated hosts on one machine, made of namespaces: each has separate networks, name, /tmp and /dev/shm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOLD = """
set -e
hostname $2
mount -t tmpfs none /mnt && mkdir /mnt/shared && mount --bind "$1" /mnt/shared
mount -t tmpfs none /tmp && chmod 1777 /tmp && mkdir -p "$1" && mount --bind /mnt/shared "$1"
mount -t tmpfs none /dev/shm && ip link set lo up
echo ready
exec sleep 3600
"""


@dataclass(frozen=True)
class Host:
    """One host; all are on two networks, `chosen` and `other`."""

    name: str
    pid: int
    """The process that holds its namespaces."""
    chosen: str
    other: str

    def inside(self, arguments: Sequence[str], **variables: str) -> list[str]:
        """Return a command that runs `arguments` on the simulated host, with environment variables."""
        set_ = [f"{name}={value}" for name, value in variables.items()]
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "env", *set_, *arguments]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = self.inside(arguments, **variables)
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    def kill_all(self) -> None:
        """End at once all that runs on the host."""
        _kill_all_on(self)

    def holds(self, process: int) -> bool:
        """Whether a process runs on the host."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(f"/proc/{process}/ns/net"), os.stat(f"/proc/{self.pid}/ns/net"))
        return False

    def listening(self) -> set[tuple[str, str]]:
        """The (process, address) pairs at which processes of the host listen, each process as NAME:PID."""
        found = set()
        for line in self.run("ss", "-Hltnp").stdout.splitlines():
            _, _, _, place, _, *process = line.split()
            name = process[0].split('"')[1] + ":" + process[0].split("pid=")[1].split(",")[0] if process else "?"
            found.add((name, place.rpartition(":")[0].removeprefix("[::ffff:").strip("[]")))
        return found


@contextlib.contextmanager
def made_hosts(shared: Path, count: int) -> Iterator[list[Host]]:
    """Make the hosts, which all see the folder `shared`; at the end all that runs on them is killed.

    Raises OSError where namespaces cannot be made.
    """
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, name in enumerate((f"host-{letter}" for letter in "abcdefgh"[:count]), start=1):
            hold = ["unshare", "--net", "--mount", "--uts", "sh", "-c", HOLD, "sh", str(shared), name]
            holder = stack.enter_context(subprocess.Popen(hold, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            stack.callback(holder.kill)
            assert holder.stdout is not None
            if (said := holder.stdout.readline()) != b"ready\n":
                raise OSError(f"no namespaces can be made here: {said.decode()}")
            hosts.append(Host(name, holder.pid, f"10.77.1.{number}", f"10.77.2.{number}"))
            stack.callback(_kill_all_on, hosts[-1])
        first, *others = hosts
        for network in (1, 2):  # a bridge on the first host, to which the others have cables
            port = f"eth{network}"
            first.run("ip", "link", "add", port, "type", "bridge")
            for other in others:
                cable = f"{other.name}.{network}"
                ends = ("type", "veth", "peer", "name", port, "netns", str(other.pid))
                first.run("ip", "link", "add", cable, *ends)
                first.run("ip", "link", "set", cable, "master", port, "up")
            for number, host in enumerate(hosts, start=1):
                host.run("ip", "address", "add", f"10.77.{network}.{number}/24", "dev", port)
                if (up := host.run("ip", "link", "set", port, "up")).returncode:
                    raise OSError(f"no network can be made here: {up.stderr}")
        yield hosts


def _kill_all_on(host: Host) -> None:
    place = os.stat(f"/proc/{host.pid}/ns/net")
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(one / "ns" / "net"), place) and int(one.name) != host.pid:
                os.kill(int(one.name), signal.SIGKILL)
