"""vLLM serves a small mixture-of-experts model on a GPU, with and without the plug-in.

``carry`` lays out what a GPU host without a network needs, ``install`` puts it there, ``model``
writes the checkpoint, ``serve`` starts the ranks and judges their answers. The README beside this
file has the commands.
"""
