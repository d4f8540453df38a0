"""Runs blocks of Python of one page, one after the other, in one namespace.

    python run_blocks.py PAGE < [[line, code], ...]

A line ``END`` follows the output of each block. Errors name the line of the page.
"""

import json
import sys

END = "\x1e"

if __name__ == "__main__":
    page, namespace = sys.argv[1], {"__name__": "page"}
    for line, code in json.load(sys.stdin):
        exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
        print(END, flush=True)
