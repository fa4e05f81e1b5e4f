"""Whether the bandwidth in a log is normal: expected times, their intervals, and causes of slow ones.

- `report`: logs beside what is expected of their machine, in words and tables;
- `diagnosis`: how likely each cause is;
- `causes`: the causes, with remedies, as changed machines (``causes.toml``);
- `nearest`: the known machine nearest to a log of an unknown one; `pairs`: bandwidths between two GPUs;
- `expected`: what nccl-tests should print for a machine.
"""

from tasp_lab.measure.check.expected import expected as expected
from tasp_lab.measure.check.report import CheckReport as CheckReport
from tasp_lab.measure.check.report import check as check
