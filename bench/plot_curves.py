"""Draw the reward curves of some runs: python bench/plot_curves.py runs/a runs/b --out docs/curve.png (extra `plot`)."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("runs", type=Path, nargs="+")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

figure, axes = plt.subplots(figsize=(7, 3.2), dpi=150)
for number, run in enumerate(args.runs):
    config = json.loads((run / "config.json").read_text())
    env = config["sources"][0]["env"]["name"]
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    color, seconds, evals, train = f"C{number}", 0.0, [], []
    for row in rows:
        seconds += sum(row.get(f"time/{phase}", 0.0) for phase in ("sample", "score", "train", "sync"))
        if "reward/mean" in row:
            train.append((seconds, row["reward/mean"]))
        if f"eval/{env}/mean" in row:
            evals.append((seconds, row[f"eval/{env}/mean"]))
    axes.plot(*zip(*train), color=color, alpha=0.25, linewidth=1)
    axes.plot(*zip(*evals), color=color, marker="o", markersize=3, label=f"held-out reward, seed {config['seed']}")
axes.set(xlabel="seconds of training (2 CPU cores)", ylabel="reward", title="python train.py", ylim=(None, 1))
axes.grid(alpha=0.3)
axes.legend(frameon=False)
figure.tight_layout()
figure.savefig(args.out)
