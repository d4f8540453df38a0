"""Parts that act on single batches, by the batch's own counts. Experimental, off by default.

Measured on two GPUs of one host; groups of more ranks were emulated on one GPU.

    split.py          replicas of each token by the batch's counts; no weight moves
    shared_expert.py  tokens of the shared expert to ranks that have room
    parts.py          makes what the switches of a deployment (``eplb.shares.switches``) say

The shared expert's part needs the split. What they decide is plain arithmetic, in ``split_rule.py``
and ``shared_rule.py``, which the kernels here repeat word by word.
"""
