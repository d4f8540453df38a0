"""Parts that act on single batches, by the batch's own counts. Experimental, off by default.

No link between GPUs has measured them: what was timed was timed on one GPU.

    split.py          replicas of each token by the batch's counts; no weight moves
    shared_expert.py  tokens of the shared expert to ranks that have room
    pulls.py          just-in-time replicas: hot experts pulled into spare slots for one batch
    parts.py          makes what the switches of a deployment (``eplb.shares.switches``) say

Each needs the split. What they decide is plain arithmetic, in ``split_rule.py``, ``shared_rule.py``
and ``pull_rule.py``, which the kernels here repeat word by word.
"""
