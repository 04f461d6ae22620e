"""Two hosts on one machine, out of namespaces: each has networks, a name, /tmp and /dev/shm of its own."""

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
    """One host; both are on two networks, `chosen` and `other`."""

    name: str
    pid: int
    """The process that holds its namespaces."""
    chosen: str
    other: str

    def inside(self, arguments: Sequence[str], **variables: str) -> list[str]:
        """A command of this machine, as one that runs on the host, with environment variables."""
        set_ = [f"{name}={value}" for name, value in variables.items()]
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "env", *set_, *arguments]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = self.inside(arguments, **variables)
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    def listening(self) -> set[tuple[str, str]]:
        """The (process, address) pairs at which processes of the host listen, each process as NAME:PID."""
        found = set()
        for line in self.run("ss", "-Hltnp").stdout.splitlines():
            _, _, _, place, _, *process = line.split()
            name = process[0].split('"')[1] + ":" + process[0].split("pid=")[1].split(",")[0] if process else "?"
            found.add((name, place.rpartition(":")[0].removeprefix("[::ffff:").strip("[]")))
        return found


@contextlib.contextmanager
def two_hosts(shared: Path) -> Iterator[tuple[Host, Host]]:
    """Make the hosts, which both see the folder `shared`; at the end all that runs on them is killed.

    Raises OSError where namespaces cannot be made.
    """
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, name in enumerate(("host-a", "host-b"), start=1):
            hold = ["unshare", "--net", "--mount", "--uts", "sh", "-c", HOLD, "sh", str(shared), name]
            holder = stack.enter_context(subprocess.Popen(hold, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            stack.callback(holder.kill)
            assert holder.stdout is not None
            if (said := holder.stdout.readline()) != b"ready\n":
                raise OSError(f"no namespaces can be made here: {said.decode()}")
            hosts.append(Host(name, holder.pid, f"10.77.1.{number}", f"10.77.2.{number}"))
            stack.callback(_kill_all_on, hosts[-1])
        for number in (1, 2):  # both ends of two cables
            cable = f"eth{number}"
            hosts[0].run("ip", "link", "add", cable, "type", "veth", "peer", "name", cable, "netns", str(hosts[1].pid))
            for host, address in zip(hosts, (f"10.77.{number}.1/24", f"10.77.{number}.2/24"), strict=True):
                host.run("ip", "address", "add", address, "dev", cable)
                if (up := host.run("ip", "link", "set", cable, "up")).returncode:
                    raise OSError(f"no network can be made here: {up.stderr}")
        yield hosts[0], hosts[1]


def _kill_all_on(host: Host) -> None:
    place = os.stat(f"/proc/{host.pid}/ns/net")
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(one / "ns" / "net"), place) and int(one.name) != host.pid:
                os.kill(int(one.name), signal.SIGKILL)
