"""Runs orders of `fit`, one after the other, on this rank of a torchrun job.

python -m torch.distributed.run --standalone --nproc-per-node N ranks_process.py ORDERS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.children import die_with_parent
from tests.exactly_once.training import fit

if __name__ == "__main__":
    die_with_parent()  # which is torchrun
    for order in json.loads(Path(sys.argv[1]).read_text()):
        fit(**order)
