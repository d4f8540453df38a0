"""Builds what a deployment runs: a rank in a serving process, a host's weight cache, a controller.

Each has a module of its own, so that a controller's process loads no torch:

    rebalance.assembly.config      the configuration, plain values: a file, the environment or
                                  code can fill it
    rebalance.assembly.change      the steps by which ranks become a group, for every cause
    rebalance.assembly.group       how the processes of ranks form their groups
    rebalance.assembly.environment build_rank_from_env: a rank of `eplb launch` or torchrun
    rebalance.assembly.rank        build_rank: a Rank, and what the model needs
    rebalance.assembly.host_cache  build_host_cache: the process of one host that holds weights
    rebalance.assembly.controller  build_controller: the process that plans

None of them imports ``api``.
"""
