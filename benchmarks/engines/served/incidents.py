"""What happens to a deployment between two rounds, while its maps change.

============  ======================================================================================
kill-store    the plug-in's process at the store is killed (``kill -9``), on each rank
stop-rank     rank 1 and its engine stop for 45 s, while the others wait for it in their next pass
reload        the engine reloads its weights from the checkpoint
sleep         the engine sleeps (level 1: its weights leave the GPU) and wakes up
============  ======================================================================================
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

STOPPED_S = 45
STOPPED_RANK = 1


def cause_incident(name: str, engine: Any, rank: int) -> None:
    """Cause an incident on this rank."""
    if name == "kill-store":
        engine.collective_rpc("watch_kill_store")
    elif name == "reload":
        engine.collective_rpc("reload_weights")
    elif name == "sleep":
        engine.sleep(level=1)
        engine.wake_up()
    elif name == "stop-rank":
        if rank == STOPPED_RANK:
            stop_session()
    else:
        raise ValueError(f"incident {name!r}, expected kill-store, stop-rank, reload or sleep")


def stop_session() -> None:
    """Stop this process, and the engine that it has started, for a while."""
    group = os.getpgrp()
    waker = f"sleep {STOPPED_S}; kill -CONT -{group}"
    subprocess.Popen(["sh", "-c", waker], start_new_session=True)
    os.killpg(group, signal.SIGSTOP)
