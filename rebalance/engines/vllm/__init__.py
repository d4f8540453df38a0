"""The plug-in for vLLM: policy, shares, taps and checks of its expert-parallel load balancer.

    entry -> hooks -> process -> policy -> decisions
               |         |
               mover     +----> tap; common: start, store_process, planning, fsck

``entry.register`` is the entry point of the group ``vllm.general_plugins``. vLLM itself is
imported inside functions alone, so this package can be read, checked and tested without it.
"""
