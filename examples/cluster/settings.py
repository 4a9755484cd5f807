"""What all processes of the example have in common: the queue, its sizes, the options."""

from __future__ import annotations

import argparse

QUEUE, TRAIN, TASK = "rollouts", "train", "train"
BUCKETS = 6

PROMPTS = 320
GROUP = 4  # answers to each prompt; one group always lies in one bucket
SAMPLES = PROMPTS * GROUP

BATCH = 16  # on each rank
STEPS_PER_CHECKPOINT = 10
STEPS_AHEAD = 4  # that rollouts may be ahead of the trainer

ROLLOUT_SECONDS = 0.02  # a policy that has something to say
STEP_SECONDS = 0.1  # a model that has something to learn


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every process takes."""
    options = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--addr", default="127.0.0.1:0", help="host:port of this process")
    options.add_argument("--seeds", required=True, help="host:port of nodes, comma between them")
    options.add_argument("--storage", default="cluster_data", help="the folder of the queue")
    return options
