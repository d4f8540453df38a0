"""Shifts ``time.time`` of a Python process by the seconds in a file, which may change at any time.

Python imports it at its start where this folder is on PYTHONPATH: before any module of the product
has taken ``time.time`` as the default of an argument. Monotonic clocks are those of the machine, as
they are where NTP sets a clock.
"""

import os
import struct
import time

FILE_VARIABLE = "PAIRS_CLOCK"  # path of the file: one double, seconds ahead

if FILE_VARIABLE in os.environ:
    _file = os.open(os.environ[FILE_VARIABLE], os.O_RDONLY | os.O_CLOEXEC)
    _true_time = time.time

    def _shifted_time() -> float:
        (ahead_s,) = struct.unpack("d", os.pread(_file, 8, 0))
        return _true_time() + float(ahead_s)

    time.time = _shifted_time
