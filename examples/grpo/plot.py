"""A run as a picture: reward, staleness, depth of the queue, waiting of the trainer."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from task import Task


def plot(task: Task, folder: Path, kills: list[tuple[int, str]]) -> None:
    """Writes `run.png` from the figures that the Trainer's logger has kept; kills are dotted."""
    steps = history(folder / "logs")
    figure = Figure(figsize=(8, 9), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    draw(axes[0], steps, {"reward": "reward of the rollouts trained"}, "reward")
    evaluated = axes[0].twinx()
    draw(evaluated, steps, {"score": "evaluation"}, task.measure, color="tab:green")
    staleness = {"mean": "mean of the batch", "max": "oldest of the batch"}
    titles = {f"queue/staleness_{key}_steps": title for key, title in staleness.items()}
    draw(axes[1], steps, titles, "staleness (versions)")
    depths = {"untaken": "not trained yet", "ready": "of them with an advantage"}
    titles = {f"queue/{key}_samples": title for key, title in depths.items()}
    draw(axes[2], steps, titles, "rollouts in the queue")
    draw(axes[3], steps, {"queue/waiting_s": "trainer's wait"}, "seconds a step")
    axes[3].set_xlabel("optimizer steps")
    for number, (step, name) in enumerate(kills):
        for axis in axes:
            axis.axvline(step, color="tab:red", linewidth=0.8, linestyle=":")
        above = 1.02 + 0.07 * (number % 3)
        axes[0].text(step, above, name, transform=axes[0].get_xaxis_transform(), size=7)
    figure.savefig(folder / "run.png", dpi=70)  # without a display


def history(logs: Path) -> dict[int, dict[str, float]]:
    """The figures of each step; of a step that was done again after a kill, those of the last."""
    steps: dict[int, dict[str, float]] = {}
    runs = sorted(logs.glob("version_*"), key=lambda path: int(path.name.split("_")[1]))
    for run in runs:
        for row in csv.DictReader((run / "metrics.csv").open()):
            found = {name: float(value) for name, value in row.items() if value and name != "step"}
            steps.setdefault(int(row["step"]), {}).update(found)
    return steps


def draw(
    axis: Axes,
    steps: dict[int, dict[str, float]],
    titles: dict[str, str],
    unit: str,
    color: str | None = None,
) -> None:
    for name, title in titles.items():
        places = [step for step in sorted(steps) if name in steps[step]]
        axis.plot(places, [steps[at][name] for at in places], label=title, color=color, linewidth=1)
    axis.set_ylabel(unit)
    axis.legend(loc="lower right" if color else "upper left", fontsize=8)
