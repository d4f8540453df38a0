"""Placement check: each live slot has the bytes of the expert that the engine's map names.

    load -> references (one digest of each expert's tensors, agreed by all ranks)
    pass -> now and then one slot -> its digests -> a fault, if they are not its expert's

An engine moves the tensors that it lists; what it derives from them (scales, packed copies, factors
of a rank) it may forget. So the check reads all tensors of the modules that own the listed ones.
"""
