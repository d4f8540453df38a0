"""Random interleavings of real rank agents over a simulated transport, device, store and clock.

    python -m benchmarks.schedules --first 0 --count 10000
    python -m benchmarks.schedules --first 4711 --count 1 --trace

A schedule is a seed. It selects a deployment (three ranks, their slots, placements to move
between), a program (actions of a controller, an operator, faults and an engine) and then, turn by
turn, one of the possible next events: a rank's step, a verdict that arrives, a part of a mover's
work, a chunk that is complete, a device operation, a write to the store, a tick of the clock.

The agents are the real ones with all their parts: phases, mover, stager, lanes, sources, ring,
voter, voting, swapper, update, watcher and recovery. Simulated are device memory and its stream,
votes, bytes and store (``simulated``). Invariants are checked where they could be violated
(``control``). ``mutants`` are ranks with a deliberate defect.
"""
