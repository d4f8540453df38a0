"""Replicas chosen by a batch's own counts; no weight moves. Experimental, off by default.

Measured on two GPUs of one host; groups of more ranks were emulated on one GPU. What the split
decides is plain arithmetic, in ``split_rule.py``, which the kernels here repeat word by word.
"""
