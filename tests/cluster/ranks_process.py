"""Runs an order of `fit` on this rank of a torchrun job, as a light member of a cluster.

python -m torch.distributed.run --standalone --nproc-per-node N ranks_process.py ORDER.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.children import die_with_parent
from tests.cluster.nodes import join, shut_down
from tests.exactly_once.training import fit

if __name__ == "__main__":
    die_with_parent()  # which is torchrun
    told = json.loads(Path(sys.argv[1]).read_text())
    join(addr=None, seeds=told["seeds"], owns_buckets=False)
    fit(**told["order"])
    shut_down()
