"""Two hosts: network namespaces with a cable between them, 10.0.0.1 and 10.0.0.2."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.0.0.1", "10.0.0.2")
INTERFACES = ("end0", "end1")
NOWHERE = "02:00:00:00:00:99"  # an address that no network card has
# How a network is cut, on each host: the words that cut it, and those that mend it. A host that may
# reach the store alone is the case in which both sides can decide.
_DROP = ("INPUT", "--source", "{other}")
_OPENED = (*_DROP, "-p", "tcp", "--syn", "--dport", "{ports}")
_BUT_STORE = (*_DROP, "-p", "tcp", "-m", "multiport", "!", "--ports", "{ports}")
CUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "link down": (
        ("ip", "link", "set", "{interface}", "down"),
        ("ip", "link", "set", "{interface}", "up"),
    ),
    "blackhole": (
        ("ip", "route", "add", "blackhole", "{other}"),
        ("ip", "route", "del", "blackhole", "{other}"),
    ),
    "drop": (
        ("iptables", "--append", *_DROP, "-j", "DROP"),
        ("iptables", "--delete", *_DROP, "-j", "DROP"),
    ),
    "drop all but the store": (
        ("iptables", "--append", *_BUT_STORE, "-j", "DROP"),
        ("iptables", "--delete", *_BUT_STORE, "-j", "DROP"),
    ),
    "drop what opens a connection": (
        ("iptables", "--append", *_OPENED, "-j", "DROP"),
        ("iptables", "--delete", *_OPENED, "-j", "DROP"),
    ),
}
_CLONE_NEWNET = 0x40000000  # linux/sched.h
NEEDED = ("unshare", "nsenter", "ip", "bash")
SCRIPT = """
set -e
coproc unshare --net sh -c 'echo is there; exec cat'
read -u ${COPROC[0]} _
other="nsenter --net --target $COPROC_PID"
ip link add end0 type veth peer name end1 netns $COPROC_PID
ip address add 10.0.0.1/24 dev end0
$other ip address add 10.0.0.2/24 dev end1
for host in "" "$other"; do $host ip link set lo up; done
ip link set end0 up
$other ip link set end1 up
echo $$ $COPROC_PID
cat || true  # its last command, bash would become: the other name space ends with its shell
exit
"""


class TwoHosts:
    """Open while the block runs.

    Raises:
        OSError: this machine allows no namespaces.
    """

    script = SCRIPT  # makes the hosts, prints the process of each, and ends with its input

    def __enter__(self) -> TwoHosts:
        if not all(map(shutil.which, NEEDED)):
            raise OSError(f"expected the programs {', '.join(NEEDED)}")
        own = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", self.script]
        self._keeper = subprocess.Popen(
            own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None, "it was asked for"
        pids = self._keeper.stdout.readline().split()
        if len(pids) != 2:
            _, errors = self._keeper.communicate()
            raise OSError(f"no namespaces on this machine: {errors.strip()}")
        self._pids = pids
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        self._keeper.kill()
        self._keeper.communicate()

    def on(self, host: int, words: list[str]) -> list[str]:
        """Give the words that run a command on a host; signals reach the command itself."""
        enter = ["nsenter", "--target", self._pids[host], "--user", "--net"]
        return [*enter, "--preserve-credentials", "--", *words]

    def cut_link(self) -> Callable[[], None]:
        """Lose every frame between the hosts, in silence as a switch would; returns what mends it.

        Frames go to a hardware address that nobody has: carrier and routes stay.
        """

        def change(verb: str, *how: str) -> None:
            for host, interface in enumerate(INTERFACES):
                other = ADDRESSES[1 - host]
                words = ["ip", "neigh", verb, other, *how, "dev", interface]
                subprocess.run(self.on(host, words), check=True)

        change("replace", "lladdr", NOWHERE, "nud", "permanent")
        return partial(change, "del")

    def cut(self, how: str, ports: object = "") -> Callable[[], None]:
        """Cut the network between the hosts, as CUTS names it; returns what mends it.

        Args:
            how: a name of CUTS.
            ports: that it is about: of the store, or those that a firewall closes (FIRST:LAST).
        """

        def change(which: int) -> None:
            for host, interface in enumerate(INTERFACES):
                names = {"interface": interface, "other": ADDRESSES[1 - host]}
                words = [w.format(**names, ports=ports) for w in CUTS[how][which]]
                subprocess.run(self.on(host, words), check=True)

        change(0)
        return partial(change, 1)

    def enter(self, host: int) -> None:
        """Move this thread, and all that it starts from now on, to a host's network; needs root.

        Raises:
            OSError: this process may not.
        """
        enter_network(self.network(host))

    def network(self, host: int) -> str:
        """Path of a host's network, for ``enter_network`` in another process."""
        return f"/proc/{self._pids[host]}/ns/net"


def enter_network(path: str) -> None:
    """Move this thread, and all that it starts from now on, to a network; needs root.

    Raises:
        OSError: this process may not.
    """
    with Path(path).open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {path}")


def folders(root: Path) -> list[Path]:
    """Make the folder of each host."""
    made = [root / f"host{number}" for number in range(len(ADDRESSES))]
    for folder in made:
        folder.mkdir()
    return made
