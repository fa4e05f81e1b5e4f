"""Processor time and peak memory of a whole command, as JSON in the last line of its standard error.

``python -I -S process_cost.py COMMAND ARGUMENT ...``. What Linux records as the peak memory of a process includes that
of the process that started it, so this one imports as little as it can.
"""

import json
import os
import sys

if __name__ == "__main__":
    process = os.fork()
    if not process:
        os.execv(sys.argv[1], sys.argv[1:])
    _, status, usage = os.wait4(process, 0)
    cost = {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": 1024 * usage.ru_maxrss}
    sys.stderr.write(f"\n{json.dumps(cost)}\n")
    sys.exit(os.waitstatus_to_exitcode(status))
