"""Random interleavings of the just-in-time replicas of ``runtime.pulls``, by rule.

    python -m benchmarks.pulls --first 0 --count 100000
    python -m benchmarks.pulls --mutant "not closed"

A schedule is a seed. Three ranks run some steps of some layers; each has a compute stream and a
side stream, and any stream that may go on can be the next one. A record is two halves, copied one
after the other, so that a read beside a write is seen. Decisions are the real ones
(``eplb.shares.pulls``) for random batches. Between steps ranks swap to another placement, flip, or
load new weights, each as soon as its own stream gets there: nothing but the protocol keeps a rank
off what another one reads. Faults: a pull that is late, counts that one rank received otherwise,
the death of a rank.

Exchanges of counts and the closing exchange end when all ranks have begun them. A dispatch or a
combine waits only for ranks that rows come from, which is the least that a dispatcher promises.

The vote that decides swaps is taken as right: ``benchmarks.schedules`` explores it. Modelled, and
not run, are the streams; ``tests/runtime/pulls`` runs the real ones.
"""
