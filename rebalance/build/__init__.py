"""Builds what a deployment runs: a rank in a serving process, a host's weight cache, a controller.

Each has a module of its own, so that a controller's process loads no torch:

    rebalance.build.config      the configuration, plain values: a TOML file, the environment or
                                code can fill it
    rebalance.build.group       how the processes of ranks form their groups
    rebalance.build.environment build_rank_from_env: a rank that `eplb launch` or torchrun started
    rebalance.build.rank        build_rank: a RankAgent, and what the model needs
    rebalance.build.host_cache  build_host_cache: the process of one host that holds weights
    rebalance.build.controller  build_controller: the process that plans

None of them imports ``api``.
"""
