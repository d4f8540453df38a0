"""Random interleavings of real rank agents over a simulated transport, device, store and clock.

    python -m benchmarks.schedules --first 0 --count 10000
    python -m benchmarks.schedules --first 4711 --count 1 --trace

A schedule is a seed. It picks a house (three ranks, their slots, placements to move between), a
program (what a controller, an operator, faults and an engine do) and then, turn by turn, one of
the things that could happen next: a rank's step, a verdict that arrives, one stretch of a mover's
work, a chunk that lands, a device that gets on, a write to the store, a tick of the clock.

The agents are the real ones, with all that belongs to them: phases, mover, stager, lanes, sources,
ring, voter, voting, swapper, update, watcher, survival and recovery. Simulated are what they talk
to: device memory and its stream (``device``), votes, bytes and store (``wires``). What must never
happen is checked where it would: ``claims``. ``mutants`` are ranks that were broken on purpose.
"""
