"""The tables and the picture of docs/results/methods.md, made from the means of benchmarks/methods.py.

A mean is a dict of one row under one condition: figures by their name, ``mixed_spread`` and ``now_spread`` (standard
deviations over the seeds), ``seeds`` and ``played``, a day. The keys of all means are (dataset, condition, row).
"""

from pages import RESULTS, put

from gossip.config.methods import METHODS

PAGE = RESULTS / "methods.md"
LOWEST = 24.0  # range of the picture in points below the best
GROUP = "diloco, H 8"  # a mean of up to 16 nodes, each of which waits for all
# The columns whose figures the page shows in full. Those of the others are in methods.json.
IN_FULL = [("digits", "dirichlet"), ("digits", "loss"), ("fashion-mnist", "dirichlet")]
# Accuracies in % of a study in synchronous rounds, which were the aims of the correction (decision 94).
AIMS = [
    ("digits, Dirichlet 0.1, 32 nodes", ("digits", "dirichlet"), 96.8),
    ("the same, 30 % failed exchanges", ("digits", "loss"), 96.4),
    ("Fashion-MNIST, IID, 16 nodes", ("fashion-mnist", "iid"), 82.4),
    ("Fashion-MNIST, Dirichlet 0.1, 16 nodes", ("fashion-mnist", "dirichlet"), 77.3),
]


def share(mean, name, digits=1):
    """Return a figure of a mean in %, with its spread if it has one, or "-" if it was not measured."""
    if mean is None or name not in mean:
        return "-"
    spread = mean.get(f"{name}_spread")
    return f"{100 * mean[name]:.{digits}f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def number(mean, name, digits=0):
    return f"{mean[name]:.{digits}f}" if name in mean else "-"


def overview(means, names, columns):
    """Return the table of the mean node just after a mix, and the days on which each row was played."""
    rows = [["mean node, %", *columns.values(), "played"]]
    for name in names:
        found = {column: means[*column, name] for column in columns if (*column, name) in means}
        days = sorted({mean["played"] for mean in found.values()})
        played = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "-"
        rows.append([name, *(share(found.get(column), "mixed") for column in columns), played])
    return rows


def detail(means, names, column):
    rows = [[
        "method", "mean", "worst", "at once", "average model", "apart", "MB a node", "s", "mixes", "failed, %",
        "cut off, %",
    ]]  # fmt: skip
    for name in names:
        mean = means.get((*column, name))
        if mean is not None:
            rows.append([
                name, share(mean, "mixed"), share(mean, "mixed_worst"), share(mean, "now"), share(mean, "average"),
                number(mean, "distance", 2), number(mean, "mb", 2), number(mean, "virtual_s"), number(mean, "mixes"),
                share(mean, "failed", 0), share(mean, "cut_off"),
            ])  # fmt: skip
    return rows


def aimed(means):
    """Return the table of what was aimed at and what is reached."""
    rows = [["accuracy, %", "aimed", "synchronous group", "the default", "default less aimed"]]
    for what, column, aim in AIMS:
        reached = means.get((*column, "default"))
        behind = "-" if reached is None else f"{100 * reached['mixed'] - aim:+.1f}"
        rows.append([what, f"{aim}", share(means.get((*column, GROUP)), "mixed"), share(reached, "mixed"), behind])
    return rows


def differences(names, rates):
    rows = [["method", "paper", "rate, IID", "rate, Dirichlet", "in what this is not the paper"]]
    for name in names:
        method = METHODS.get(name.removesuffix(", H 8"))
        differs = "ours" if method is None else method.differs
        rows.append([name, "-" if method is None else method.paper, *map(str, rates[name]), differs])
    return rows


def draw(means, datasets, condition):
    """Draw accuracy against MB a node, one point a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(datasets), figsize=(14, 8), squeeze=False)
    for axis, dataset in zip(axes[0], datasets, strict=True):
        points = {}
        for (of_dataset, of_condition, name), mean in means.items():
            if of_dataset == dataset and of_condition == condition and "mb" in mean:
                points[name] = (max(mean["mb"], 1e-3), 100 * mean["mixed"])
        best = max((accuracy for _, accuracy in points.values()), default=100.0)
        taken: list[tuple[float, float]] = []  # places of labels: MB and height
        for name, (mb, accuracy) in sorted(points.items(), key=lambda item: -item[1][1]):
            height = max(accuracy, best - LOWEST)  # points far below are drawn at the edge, with their value
            ours = name.startswith("default")
            axis.plot(mb, height, "o" if height == accuracy else "v", color="#d55e00" if ours else "#0072b2", ms=5)
            label = name if height == accuracy else f"{name}: {accuracy:.0f}"
            # Move a label down until it overlaps no other; labels within a factor of eight in MB may overlap.
            label_height = height
            while any(
                abs(label_height - other) < LOWEST / 32 and 1 / 8 < mb / other_mb < 8 for other_mb, other in taken
            ):
                label_height -= LOWEST / 120
            taken.append((mb, label_height))
            line = {"arrowstyle": "-", "color": "#999999", "lw": 0.5, "shrinkB": 2}
            axis.annotate(label, (mb, height), (mb * 1.25, label_height), fontsize=7.5, va="center", arrowprops=line)
        axis.set_xlim(5e-4, 4e2)
        axis.set_xscale("log")
        axis.set_xlabel("MB sent by a node")
        axis.set_ylabel("accuracy of the mean node just after a mix, %")
        axis.set_title(f"{dataset}, Dirichlet 0.1")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PAGE.with_suffix(".png"), dpi=110)
    plt.close(figure)


def write(means, names, rates, columns, datasets):
    """Write the tables into the page, and draw the picture.

    Args:
        means: (dataset, condition, method) -> means over the seeds.
        names: Names of the rows, in order.
        rates: Learning rates by row.
        columns: The name of each (dataset, condition), in order.
        datasets: The data sets of the picture.
    """
    put(PAGE, "overview", overview(means, names, columns))
    put(PAGE, "aimed", aimed(means))
    for column in IN_FULL:
        put(PAGE, columns[column], detail(means, names, column))
    put(PAGE, "rates", differences(names, rates))
    draw(means, datasets, "dirichlet")
