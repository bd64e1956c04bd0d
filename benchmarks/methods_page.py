"""The page docs/results/methods.md and its picture, made from the figures of benchmarks/methods.py."""

import statistics
from pathlib import Path

from gossip.config.methods import METHODS

PICTURE = "methods.png"
LOWEST = 24.0  # range of the picture in points below the best

INTRODUCTION = """# Every published method on the same work

Written by `make bench-methods`. {peers} Every run takes the same number of local steps ({steps}), with SGD without
momentum or, where that is the method, quasi-global momentum of {quasi_global}; batches of 8, a perceptron of 64 hidden
units, models that begin alike. A step takes 0.1 s and 5 % either way, a message 5 ms, and a peer sends 100 Mbit/s.
A method mixes as often as its configuration in `gossip methods` says, so that its MB a node say how often; where that
is more rarely than every 8 steps, a row "H 8" has it at 8 as well, since models as small as these want it so. Inner
optimizers that papers name (Adam) are SGD here. Figures are means of {seeds} seeds, after ± their standard deviation.

- **IID**, **Dirichlet 0.1**: how the samples are divided; each peer's own are private.
- **30 % failed exchanges**: messages and streams are lost for good (`network.congestion = "none"`: TCP would send them
  again), so many that three of ten exchanges that begin fail, each
  after about an interval; the column "failed" has the share. A node tries again, so that it costs time and not a mix.
- **churn**: times up as those of spot machines, 14 times as fast: a third of the peers go during a run, without a
  goodbye, and most come back and take the weights of the others. It ends when as many steps were taken as elsewhere.
- **uneven paces** (digits): six of the 32 peers take four times as long for a step. All take as many steps together as
  elsewhere.
- **cut off**: the share of mixes of which a filter took nothing or a part, each side counting.
- **mean, worst**: accuracy on 1,000 (digits: 360) held-out samples, over nodes, each **just after its last mix**, which
  is when a model would be kept. **at once**: the mean over nodes at the instant of the end, up to an interval of local
  steps later. **average model**: of the mean of all models. **apart**: the consensus distance at that instant.
- **s**: virtual seconds until all steps were taken; more than {step_s:g} a step is waiting for others.
"""

READING = """What the table says:

- On IID data everything that mixes is within two points, but for SPARTA's half a per cent and for what mixes every 50
  steps. Non-IID data and failures tell methods apart.
- On non-IID data how often nodes mix is worth most: SGP, D-PSGD and AD-PSGD at every step are ahead of the same
  arithmetic at every 8 steps, at six to fifteen times the bytes. Moniqua gives AD-PSGD's accuracy for a quarter of its
  bytes.
- Quasi-global momentum is worth about as much and costs no byte. It loses one to two points when exchanges fail, and
  its worst node is near to its mean.
- The default's correction of each node's own data is worth two to six points on non-IID data, costs no byte either, and
  needs no optimizer of its own: "default" beside "default, no correction". A node is then nearly as good at any instant
  as just after a mix.
- DiLoCo at every 8 steps, 16 nodes together with a momentum of 0.9, is the strongest of all on non-IID data, at twice
  the default's bytes.
- The outer step alone gains one to four points over the plain mean on non-IID data, but with failed exchanges, where it
  loses two to eight: it takes one exchange at a time in all, so that it loses more mixes than the plain mean where a
  failure is slow to be seen (below).
- One-way methods lose most when messages are lost: a push that is in doubt is neither here nor there, and nodes mix
  less. SGP in lockstep waits instead: 577 s for 96 s of steps.
- The default's filter costs nothing that can be told from noise: "noloco, H 8" is "default, no correction" without it,
  0.5 points ahead on digits, IID, at a rate of 1.0 that throws nodes off with any filter and without (decisions/0020
  counts how often and for how long).
- The average of all models is several points better than the nodes wherever they are apart: mix to the end, or take the
  mean of a few nodes, before a model is kept.
"""

BESIDE = """The first figure of each column is of an earlier simulation, in synchronous rounds with a random perfect
matching and looked at just after a mix: 32 nodes, 120 rounds of 8 steps, two seeds. Ours is asynchronous: intervals are
jittered by a quarter, a node looks for its partner while it trains, and "at once" is any instant. Three things differ,
and explain what differs in the figures:

- **When one looks.** Just after a mix a node is up to five points better than at any instant; in rounds without failure
  all nodes have just mixed. One-way push is the exception: in a round 37 % of the nodes receive nothing and are looked
  at without a mix, so that its earlier figure lies between our two.
- **How many mixes there are.** In rounds a failure costs one mix of the two, 84 of 120 are left. Here it costs the time
  until it is seen, an interval, during which a node with outer momentum, which takes one exchange at a time in all,
  also answers BUSY: 49 mixes are left to it, 94 to the plain mean, and it falls behind. With stall_s and bench_s of
  0.1 s and reply_timeout_s of 0.25 s instead it has 98, and the order is the earlier one: 90.9 % against 88.3 % (three
  seeds). Where failures are common, let the timeouts be short.
- **Rates.** Ours are the best of 0.1, 0.3 and 1 (quasi-global: 0.03, 0.1 and 0.3) without failures; on IID data the
  highest is the best of nearly all methods, and all four are within a point, as the earlier ones nearly are.
"""


def percent(runs, name):
    values = [100 * run[name] for run in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def plain(runs, name, digits=1, scale=1.0):
    return f"{scale * statistics.mean(run[name] for run in runs):.{digits}f}"


def table(heads, lines):
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines)]) + "\n"


def overview(figures, names, datasets, conditions):
    """Return the table of the mean node just after a mix, for every method and condition."""
    played = {key[:2] for key, runs in figures.items() if runs}
    columns = [
        (dataset, condition) for dataset in datasets for condition in conditions if (dataset, condition) in played
    ]
    heads = ["mean node, %", *(f"{dataset}, {conditions[condition]}" for dataset, condition in columns)]
    lines = []
    for name in names:
        cells = (figures.get((*column, name)) for column in columns)
        lines.append([name, *(percent(runs, "mixed") if runs else "-" for runs in cells)])
    return table(heads, lines)


def detail(figures, names, dataset, condition):
    heads = [
        "method",
        "mean",
        "worst",
        "at once",
        "average model",
        "apart",
        "MB a node",
        "s",
        "mixes",
        "failed",
        "cut off",
    ]
    lines = []
    for name in names:
        runs = figures.get((dataset, condition, name))
        if not runs:
            continue
        lines.append([
            name, percent(runs, "mixed"), plain(runs, "mixed_worst", scale=100), percent(runs, "now"),
            plain(runs, "average", scale=100), plain(runs, "distance", 2), plain(runs, "mb", 2),
            plain(runs, "virtual_s", 0), plain(runs, "mixes", 0), plain(runs, "failed", 0, 100) + " %",
            plain(runs, "cut_off", 1, 100) + " %",
        ])  # fmt: skip
    return table(heads, lines)


# Mean node accuracy after a mix in synchronous rounds: IID, Dirichlet 0.1, and with 30 % failed exchanges. The runs had
# 32 nodes, 120 rounds of 8 steps, the best of three rates, and two seeds (gaps under a point are noise).
SMALL = {
    "default, plain mean": ("SGD", 96.7, 92.9, 91.0), "default, quasi-global": ("quasi-global", 95.5, 94.1, 93.6),
    "default": ("outer momentum (NoLoCo)", 96.3, 94.6, 92.7),
    "one-way push": ("one-way push", 95.3, 88.9, 85.3),
}  # fmt: skip
NOISE = 1.0  # points


def small_table(figures, conditions):
    """Compare digits with the earlier synchronous rounds, and list the pairs of methods that change places."""
    lines, swapped = [], []
    for name, (label, *earlier) in SMALL.items():
        cells = []
        for condition, was in zip(conditions, earlier, strict=False):
            runs = figures.get(("digits", condition, name))
            cells += [f"{was}", percent(runs, "mixed"), percent(runs, "now")] if runs else [f"{was}", "-", "-"]
        lines.append([label, *cells])
    for place, condition in enumerate(list(conditions)[:3], 1):
        found = {name: figures.get(("digits", condition, name)) for name in SMALL}
        here = {name: 100 * statistics.mean(run["mixed"] for run in runs) for name, runs in found.items() if runs}
        for one in here:
            for other in here:
                if SMALL[one][place] > SMALL[other][place] + NOISE and here[one] < here[other] - NOISE:
                    first, second = SMALL[one][0], SMALL[other][0]
                    swapped.append(f"{conditions[condition]}: {second} is {here[other] - here[one]:.1f} above {first}.")
    heads = ["method"]
    for label in list(conditions.values())[:3]:
        heads += [f"{label}: rounds", "after a mix", "at once"]
    said = "".join(f"- {one}\n" for one in swapped)
    swaps = (
        f"Methods that change places by more than noise:\n\n{said}" if swapped else "No two methods change places.\n"
    )
    return table(heads, lines) + "\n" + swaps


def differences(names, rates):
    lines = []
    for name in names:
        method = METHODS.get(name.removesuffix(", H 8"))
        differs = "ours" if method is None else method.differs
        lines.append([name, "-" if method is None else method.paper, *map(str, rates[name]), differs])
    return table(["method", "paper", "rate, IID", "rate, Dirichlet", "in what this is not the paper"], lines)


def draw(path, figures, datasets, condition):
    """Draw accuracy against MB a node, one point a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    whole, axes = plt.subplots(1, len(datasets), figsize=(14, 8), squeeze=False)
    for axis, dataset in zip(axes[0], datasets, strict=True):
        points = {}
        for (which, under, name), runs in figures.items():
            if which == dataset and under == condition and runs:
                at = [statistics.mean(run[key] for run in runs) for key in ("mb", "mixed")]
                points[name] = (max(at[0], 1e-3), 100 * at[1])
        best = max((accuracy for _, accuracy in points.values()), default=100.0)
        taken: list[tuple[float, float]] = []
        for name, (mb, accuracy) in sorted(points.items(), key=lambda item: -item[1][1]):
            height = max(accuracy, best - LOWEST)  # points far below are drawn at the edge, with their value
            ours = name.startswith("default")
            axis.plot(mb, height, "o" if height == accuracy else "v", color="#d55e00" if ours else "#0072b2", ms=5)
            label = name if height == accuracy else f"{name}: {accuracy:.0f}"
            # Move a label down until it overlaps no other; labels within a factor of eight in MB may overlap.
            at = height
            while any(abs(at - h) < LOWEST / 32 and 1 / 8 < mb / m < 8 for m, h in taken):
                at -= LOWEST / 120
            taken.append((mb, at))
            line = {"arrowstyle": "-", "color": "#999999", "lw": 0.5, "shrinkB": 2}
            axis.annotate(label, (mb, height), (mb * 1.25, at), fontsize=7.5, va="center", arrowprops=line)
        axis.set_xlim(5e-4, 4e2)
        axis.set_xscale("log")
        axis.set_xlabel("MB sent by a node")
        axis.set_ylabel("accuracy of the mean node just after a mix, %")
        axis.set_title(f"{dataset}, Dirichlet 0.1")
        axis.grid(alpha=0.3)
    whole.tight_layout()
    whole.savefig(path, dpi=110)
    plt.close(whole)


def write_page(path, figures, names, rates, world):
    """Write the page and draw the picture.

    Args:
        path: The page.
        figures: (dataset, condition, method) -> figures of the runs.
        names: Names of the rows, in order.
        rates: Learning rates by row.
        world: Conditions that the introduction states.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs, conditions = world["jobs"], world["conditions"]
    peers = ", ".join(f"{job['peers']} peers on {dataset}" for dataset, job in jobs.items()) + "."
    steps = ", ".join(f"{job['steps']} on {dataset}" for dataset, job in jobs.items())
    done, wanted = world["runs"]
    parts = [
        INTRODUCTION.format(peers=peers, steps=steps, **{k: world[k] for k in ("quasi_global", "seeds", "step_s")}),
        *([] if done == wanted else [f"**{done} of {wanted} runs are in: figures are of those.**\n"]),
        "## All at a glance\n", overview(figures, names, jobs, conditions), READING,
        f"![accuracy against MB]({PICTURE})\n",
        "## Beside the synchronous rounds\n", BESIDE, small_table(figures, conditions),
    ]  # fmt: skip
    for dataset in jobs:
        for condition, label in conditions.items():
            if not any(figures.get((dataset, condition, name)) for name in names):
                continue
            parts += [f"## {dataset}, {label}\n", detail(figures, names, dataset, condition)]
    parts += [
        "## Rates and differences\n",
        "Each rate is the best of three on digits, one seed; on Fashion-MNIST a twentieth: its inputs are larger.\n",
        differences(names, rates),
    ]
    path.write_text("\n".join(parts), encoding="utf-8")
    draw(path.with_name(PICTURE), figures, list(jobs), "dirichlet")
