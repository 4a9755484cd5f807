"""A rollout process: puts groups of answers, each group into the bucket of its prompt.

    python rollout.py --seeds 127.0.0.1:7701,127.0.0.1:7702 --worker 0 --workers 2

It is a light member: it owns nothing, and may be killed at any time.
"""

from __future__ import annotations

import time

import torch
from member import light_member, open_queue
from settings import GROUP, PROMPTS, ROLLOUT_SECONDS, TRAIN, parser
from tensordict import TensorDict

from persisting_torch import Queue


def answers(prompt: int) -> TensorDict:
    """A group: some answers to one prompt, and what each of them is worth."""
    told = torch.randn(GROUP, 8, generator=torch.Generator().manual_seed(prompt))
    return TensorDict(
        {
            "prompt_id": torch.full([GROUP], prompt),
            "answer": told,
            "reward": told.square().sum(1),
            "name": prompt * GROUP + torch.arange(GROUP),
        },
        batch_size=[GROUP],
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--worker", type=int, required=True, help="which of them this is, from 0")
    options.add_argument("--workers", type=int, required=True, help="how many there are")
    options.add_argument("--ranks", type=int, default=2, help="of the trainer, for the pace")
    given = options.parse_args()
    name = f"rollout-{given.worker}"
    with light_member(given), open_queue(given, given.ranks) as queue:
        with queue.producer(name):
            for prompt in range(given.worker, PROMPTS, given.workers):
                queue.sync.put(answers(prompt), TRAIN)
                queue.sync.flush()  # on disk from here on, whoever dies
                print(f"{name} has put group {prompt}", flush=True)
                time.sleep(ROLLOUT_SECONDS)
        if all_are_done(queue, given.workers):
            queue.sync.seal(TRAIN)
            print(f"{name} is the last, and has sealed the partition", flush=True)


def all_are_done(queue: Queue, workers: int) -> bool:
    """Whether every rollout process has ended its work; of the last one that is true."""
    producers = queue.sync.stats()["producers"].values()
    return sum(one["state"] == "done" for one in producers) == workers


if __name__ == "__main__":
    main()
