"""Kinds of Redis failures, their messages and their handling: one table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Trait:
    """How to handle a kind of failure, and its message."""

    words: str
    is_passing: bool = False  # may be over at the next attempt
    is_absence: bool = False  # the server does not respond: other calls need not try


_KEPT = "what was acknowledged before is kept"


class Trouble(Enum):
    """Kinds of failure with their own message or handling."""

    UNREACHABLE = Trait("cannot be reached, expected a server that answers", True, True)
    SLOW = Trait("does not answer, expected an answer within the timeout", True, True)
    LOADING = Trait("is loading its data set, expected it to be loaded", True, True)
    CLUSTER_DOWN = Trait("is down as a cluster, expected a primary for every slot", True, True)
    BUSY = Trait("is busy with another script, expected it to end within the timeout", True)
    READ_ONLY = Trait("is a read-only replica, expected a primary", True)
    FULL = Trait(f"is full, expected room below its maxmemory; {_KEPT}")
    NOT_SAVING = Trait(f"cannot write its files, expected a disk with room; {_KEPT}")
    LOGIN = Trait("refuses the login, expected the URL's user and password to be known")
    FORBIDDEN = Trait("forbids the user a command, expected the permissions of the docs")
    NOT_TRUSTED = Trait("fails TLS, expected certificates and keys that fit those of the URL")
    NO_SOCKET = Trait("has no socket file, expected a server that listens on it", True, True)
    SOCKET_FORBIDDEN = Trait("forbids this user its socket file, expected the right to write to it")
    NODE_OF_CLUSTER = Trait("is a node of a cluster, expected a URL redis+cluster:// for it")
    NO_CLUSTER = Trait("is not a cluster, expected a URL redis:// for it")
    OTHER = Trait("failed, expected it to take the command")


# The first word of an error reply. A script's errors carry that of the command that failed; Redis
# 6.2 puts a dash before it and more words around it.
_BY_WORD = {
    "OOM": Trouble.FULL,
    "MISCONF": Trouble.NOT_SAVING,
    "LOADING": Trouble.LOADING,
    "BUSY": Trouble.BUSY,
    "READONLY": Trouble.READ_ONLY,
    "NOREPLICAS": Trouble.READ_ONLY,
    "MASTERDOWN": Trouble.CLUSTER_DOWN,
    "CLUSTERDOWN": Trouble.CLUSTER_DOWN,
    "TRYAGAIN": Trouble.CLUSTER_DOWN,
    "MOVED": Trouble.NODE_OF_CLUSTER,
    "ASK": Trouble.NODE_OF_CLUSTER,
    "WRONGPASS": Trouble.LOGIN,
    "NOAUTH": Trouble.LOGIN,
    "NOPERM": Trouble.FORBIDDEN,
}
_WORD = re.compile(rf"(?:^|-)({'|'.join(_BY_WORD)}) ")
# What has no such word.
_BY_PHRASE = {
    "Cluster mode is not enabled": Trouble.NO_CLUSTER,
    "slots are not covered": Trouble.CLUSTER_DOWN,
    "is not covered by the cluster": Trouble.CLUSTER_DOWN,
    "can't run this command": Trouble.FORBIDDEN,
    "can't access at least one of the keys": Trouble.FORBIDDEN,
    "max number of clients reached": Trouble.UNREACHABLE,
}


def trouble_in(text: str) -> Trouble | None:
    """Return the kind of an error reply; None when it is unknown."""
    found = _WORD.search(text)
    if found:
        return _BY_WORD[found.group(1)]
    return next((trouble for phrase, trouble in _BY_PHRASE.items() if phrase in text), None)
