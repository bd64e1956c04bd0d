"""The page docs/results/methods.md and its picture, made from the means of benchmarks/methods.py.

A mean is a dict of one row under one condition: figures by their name, ``mixed_spread`` and ``now_spread`` (standard
deviations over the seeds), ``seeds`` and ``played``, a day. The keys of all means are (dataset, condition, row).
"""

import textwrap
from pathlib import Path

from gossip.config.methods import METHODS

PICTURE = "methods.png"
INTERVAL = Path(__file__).resolve().parent.parent / "docs" / "results" / "interval.md"
IN_FULL = """Three columns of the table above. [methods.json](methods.json) has the same figures of all columns, and the
share of mixes of which a filter took nothing or a part (`cut_off`, each side counting)."""
LOWEST = 24.0  # range of the picture in points below the best
# The (dataset, condition) whose figures the page shows in full. Those of the others are in methods.json.
DETAILED = [("digits", "dirichlet"), ("digits", "loss"), ("fashion-mnist", "dirichlet")]

TITLE = "# Every published method on the same work\n"
WORK = """Written by `make bench-methods`. {played} {peers} Every run takes the same number of local steps ({steps}),
with SGD without momentum or, where that is the method, quasi-global momentum of {quasi_global}; batches of 8, a
perceptron of 64 hidden units, models that begin alike. A step takes 0.1 s and 5 % either way, a message 5 ms, and a
peer sends 100 Mbit/s. A method mixes as often as its configuration in `gossip methods` says, so that its MB a node
say how often; where that is more rarely than every 8 steps, a row "H 8" has it at 8 as well, since models as small
as these want it so. Inner optimizers that papers name (Adam) are SGD here. Figures are means of {seeds} seeds, after
± their standard deviation."""
OURS = """Our own rows: "default" is `Config()`, whose nodes choose interval and codec by themselves. "default, every
8 steps" is the same in fp32 at one interval, and "default, no correction" has the outer step alone. The plain mean,
quasi-global momentum and the one-way push mix in fp32 every 8 steps."""
TERMS = """
- **IID**, **Dirichlet 0.1**: how the samples are divided; each peer's own are private.
- **30 % failed exchanges**: messages and streams are lost for good (`network.congestion = "none"`: TCP would send them
  again), so many that three of ten exchanges that begin fail, each
  after about an interval; the column "failed" has the share. A node tries again, so that it costs time and not a mix.
- **churn**: times up as those of spot machines, 14 times as fast: a third of the peers go during a run, without a
  goodbye, and most come back and take the weights of the others. It ends when as many steps were taken as elsewhere.
- **uneven paces** (digits): six of the 32 peers take four times as long for a step. All take as many steps together as
  elsewhere.
- **mean node, worst**: accuracy on 1,000 (digits: 360) held-out samples, over nodes, each **just after its last
  mix**, which is when a model would be kept. **at once**: the mean over nodes at the instant of the end, up to an
  interval of local steps later. **average model**: of the mean of all models. **apart**: the consensus distance at
  that instant.
- **s**: virtual seconds until all steps were taken; more than {step_s:g} a step is waiting for others.
"""


def share(mean, name, digits=1):
    """Return a figure of a mean in %, with its spread if it has one, or "-" if it was not measured."""
    if mean is None or name not in mean:
        return "-"
    spread = mean.get(f"{name}_spread")
    return f"{100 * mean[name]:.{digits}f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def number(mean, name, digits=0):
    return f"{mean[name]:.{digits}f}" if name in mean else "-"


def table(heads, lines):
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines)]) + "\n"


def columns_of(means, jobs, conditions):
    """Return the (dataset, condition) of which there are figures, in order."""
    played = {key[:2] for key in means}
    return [
        column for dataset in jobs for column in ((dataset, condition) for condition in conditions) if column in played
    ]


def overview(means, names, columns, conditions):
    """Return the table of the mean node just after a mix, for every method and condition."""
    heads = ["mean node, %", *(f"{dataset}, {conditions[condition]}" for dataset, condition in columns)]
    lines = [[name, *(share(means.get((*column, name)), "mixed") for column in columns)] for name in names]
    return table(heads, lines)


def detail(means, names, dataset, condition):
    """Return the table of all figures of one dataset and condition but the mean node's, which the overview has."""
    heads = [
        "method", "worst", "at once", "average model", "apart", "MB a node", "s", "mixes", "failed, %",
    ]  # fmt: skip
    lines = []
    for name in names:
        mean = means.get((dataset, condition, name))
        if mean is not None:
            lines.append([
                name, share(mean, "mixed_worst"), share(mean, "now"), share(mean, "average"),
                number(mean, "distance", 2), number(mean, "mb", 2), number(mean, "virtual_s"), number(mean, "mixes"),
                share(mean, "failed", 0),
            ])  # fmt: skip
    return table(heads, lines)


def days(means, names):
    """Return the sentence that says on which day each row was played."""
    by_day = {}
    for name in names:
        played = {mean["played"] for (_, _, row), mean in means.items() if row == name}
        if played:
            by_day.setdefault(span(sorted(played)), []).append(name)
    *older, newest = sorted(by_day)
    sentence = f"The rows {', '.join(map(quoted, by_day[newest]))} are of {newest}"
    return f"{sentence}, the others of {' and '.join(older)}." if older else f"All rows are of {newest}."


def quoted(name):
    return f'"{name}"'


# -- what the table says -----------------------------------------------------------------------------------------------
class Reading:
    """Sentences on the means; each number in them is computed from the means that the page shows."""

    def __init__(self, means, columns):
        self.means, self.columns = means, columns

    def of(self, name, dataset, condition, figure="mixed"):
        return self.means[dataset, condition, name][figure]

    def gains(self, row, other, columns, figure="mixed"):
        """Return how many points one row is ahead of another, over columns that have both: "-0.1 to +2.9"."""
        points = [
            100 * (self.of(row, *column, figure) - self.of(other, *column, figure))
            for column in columns if all((*column, name) in self.means for name in (row, other))
        ]  # fmt: skip
        return span([f"{value:+.1f}" for value in sorted(points)])

    def ratios(self, row, other, columns, figure):
        """Return how many times another row's figure a row has: "5.2 to 5.9"."""
        values = [self.of(row, *column, figure) / self.of(other, *column, figure) for column in columns]
        return span([f"{value:.2g}" for value in sorted(values)])


def span(values):
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


PLAIN, QUASI = "plain mean, every 8 steps", "quasi-global, every 8 steps"
DEFAULT, EIGHT, UNCORRECTED = "default", "default, every 8 steps", "default, no correction"
GROUP, OUTER = "diloco, H 8", "noloco, H 8"
RARE = {"sparta", "diloco", "noloco", "streaming-diloco", "local-sgd"}


def reading(means, columns):
    """Return the list of what the tables say."""
    read = Reading(means, columns)
    gain, ratio = read.gains, read.ratios
    uneven = [column for column in columns if column[1] == "dirichlet"]
    failing = [column for column in columns if column[1] == "loss"]
    whole = [column for column in columns if column[1] != "loss"]
    often = [
        100 * mean["mixed"]
        for (*column, name), mean in means.items()
        if column == ["digits", "iid"] and name not in RARE
    ]
    width = max(often) - min(often)
    waited_s = read.of("sgp", "digits", "loss", "virtual_s")
    lines = [
        f"""On IID digits all rows are within {width:.1f} points of each other, except SPARTA's half a per cent, local
        steps alone, and what mixes an element every 40 or 50 steps. Non-IID data and failures tell methods apart.""",
        f"""On non-IID data it counts most how often nodes mix. AD-PSGD at every step is ahead of the plain mean
        every 8 steps by {gain("ad-psgd", PLAIN, uneven)} points, and SGP ahead of GoSGD by
        {gain("sgp", "gosgd", uneven)}, at {ratio("ad-psgd", PLAIN, uneven, "mb")} and
        {ratio("sgp", "gosgd", uneven, "mb")} times the bytes. Moniqua differs from AD-PSGD by
        {gain("moniqua", "ad-psgd", uneven)} points, at {ratio("moniqua", "ad-psgd", uneven, "mb")} times its bytes.""",
        f"""Quasi-global momentum every 8 steps is ahead of the plain mean by {gain(QUASI, PLAIN, uneven)} points on
        non-IID data, and by {gain(QUASI, PLAIN, failing)} where exchanges fail too. It costs no byte.""",
        f"""Nodes that choose their interval and codec ("default") are ahead of fp32 every 8 steps by
        {gain(DEFAULT, EIGHT, whole)} points, at {ratio(DEFAULT, EIGHT, uneven, "mb")} times the bytes. Where 30 % of
        exchanges fail they keep to 8 steps, and are ahead by {gain(DEFAULT, EIGHT, failing)}. The worst node is
        ahead by {gain(DEFAULT, EIGHT, whole, "mixed_worst")} points: it is one node of 16 or 32, and varies with the
        seed.""",
        f"""With such short intervals the correction of each node's own data is worth
        {gain(DEFAULT, UNCORRECTED, uneven)} points on non-IID data ("default" less "default, no correction"), and
        {gain(DEFAULT, UNCORRECTED, failing)} where exchanges fail too and nodes keep to 8 steps. It costs nine bytes
        in an offer and in an accept. "default, every 8 steps" is ahead of "{OUTER}", whose outer step is 0.5/0.7 and
        which has neither correction nor filter, by {gain(EIGHT, OUTER, uneven)}.""",
        f"""DiLoCo every 8 steps, a mean of up to 16 nodes with a momentum of 0.9, is the strongest of all on non-IID
        data: {gain(GROUP, DEFAULT, uneven)} points ahead of the default. It sends
        {ratio(GROUP, DEFAULT, uneven, "mb")} times the default's bytes, and each mix waits for all members of its
        group.""",
        f"""The outer step alone, NoLoCo every 8 steps, is ahead of the plain mean by {gain(OUTER, PLAIN, uneven)}
        points on non-IID data, and by {gain(OUTER, PLAIN, failing)} where exchanges fail too.""",
        f"""One-way methods lose most when messages are lost: a push that is in doubt is neither here nor there, and
        nodes mix less. SGP in lockstep waits instead: {waited_s:.0f} s for 96 s of steps on digits.""",
        f"""The average of all models is better than the mean node wherever nodes are apart: with AD-PSGD by
        {average_gain(read, "ad-psgd", uneven)} points on non-IID data. Mix to the end, or take the [average of a
        node's own mixes](../algorithms.md#the-model-to-evaluate), before a model is kept.""",
    ]
    return "What the tables say, with ranges over the columns concerned:\n\n" + "\n".join(map(bullet, lines)) + "\n"


def average_gain(read, name, columns):
    """Return how many points the average of all models is ahead of the mean node."""
    gains = [100 * (read.of(name, *column, "average") - read.of(name, *column)) for column in columns]
    return span([f"{value:.1f}" for value in sorted(gains)])


def bullet(text):
    return filled(text, initial_indent="- ", subsequent_indent="  ")


def filled(text, **indents):
    """Return one paragraph in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False, **indents)


# -- aimed, reached ----------------------------------------------------------------------------------------------------
AIMED = """Before the correction was built, a study in synchronous rounds played it with a quasi-global momentum at
every node, three seeds. Its figures were the aims. Two things differ here: nodes are asynchronous, with uneven
intervals and mixes that land while a node trains; and the momentum was not built, since it costs a GPT with AdamW 6
% more loss at its best rate ([decision 94](../decisions/0094-a-correction-of-own-data.md)). "Synchronous group" is
"{group}": a mean of up to 16 nodes, each of which waits for all, at {bytes} times the default's bytes. The row of 128
nodes is at any instant, of [interval and codec](interval.md); the others are just after a mix."""
# (what, dataset, condition, aimed in %); None for a world of another page.
AIMS = [
    ("digits, Dirichlet 0.1, 32 nodes", ("digits", "dirichlet"), 96.8),
    ("the same, 30 % failed exchanges", ("digits", "loss"), 96.4),
    ("digits, Dirichlet 0.1, 128 nodes", None, 93.2),
    ("Fashion-MNIST, IID, 16 nodes", ("fashion-mnist", "iid"), 82.4),
    ("Fashion-MNIST, Dirichlet 0.1, 16 nodes", ("fashion-mnist", "dirichlet"), 77.3),
]
LARGE_WORLD = "| digits, Dirichlet 0.1, 128 nodes, LAN | "


def aimed(means):
    """Return the table of what was aimed at and what is reached."""
    lines = []
    for what, column, aim in AIMS:
        group = means.get((*column, GROUP)) if column else None
        reached = 100 * means[(*column, "default")]["mixed"] if column else of_many_nodes()
        if reached is not None:
            lines.append([what, f"{aim}", share(group, "mixed"), f"{reached:.1f}", f"{reached - aim:+.1f}"])
    bytes_ = Reading(means, ()).ratios(GROUP, "default", [aim[1] for aim in AIMS if aim[1]], "mb")
    heads = ["accuracy, %", "aimed", "synchronous group", "the default", "default less aimed"]
    reached = sum(float(line[4]) >= 0 for line in lines)
    by_group = [float(line[2].split()[0]) >= float(line[1]) for line in lines if line[2] != "-"]
    result = f" The default reaches {reached} of {len(lines)} aims, the group {sum(by_group)} of {len(by_group)}."
    text = filled(AIMED.format(group=GROUP, bytes=bytes_) + result)
    return f"## Aimed, reached\n\n{text}\n\n{table(heads, lines)}"


def of_many_nodes():
    """Return the default's accuracy with 128 nodes in %, from the page of benchmarks/interval.py; None without it."""
    text = INTERVAL.read_text(encoding="utf-8") if INTERVAL.exists() else ""
    row = next((line for line in text.splitlines() if line.startswith(LARGE_WORLD)), None)
    return float(row.split("|")[3].split("(")[0]) if row else None


def differences(names, rates):
    lines = []
    for name in names:
        if name.endswith(", H 8"):
            lines.append([name, "the same", *map(str, rates[name]), "the same"])
            continue
        method = METHODS.get(name)
        differs = "ours" if method is None else method.differs
        lines.append([name, "-" if method is None else method.paper, *map(str, rates[name]), differs])
    return table(["method", "paper", "rate, IID", "rate, Dirichlet", "in what this is not the paper"], lines)


def draw(path, means, datasets, condition):
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
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_page(path, means, names, rates, world):
    """Write the page and draw the picture.

    Args:
        path: The page.
        means: (dataset, condition, method) -> means over the seeds.
        names: Names of the rows, in order.
        rates: Learning rates by row.
        world: Conditions that the introduction states.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs, conditions = world["jobs"], world["conditions"]
    columns = columns_of(means, jobs, conditions)
    peers = ", ".join(f"{job['peers']} peers on {dataset}" for dataset, job in jobs.items()) + "."
    steps = ", ".join(f"{job['steps']} on {dataset}" for dataset, job in jobs.items())
    stated = {key: world[key] for key in ("quasi_global", "seeds")}
    parts = [
        TITLE, filled(WORK.format(peers=peers, steps=steps, played=days(means, names), **stated)), "", filled(OURS),
        TERMS.format(step_s=world["step_s"]), "## All at a glance\n",
        overview(means, names, columns, conditions), reading(means, columns),
        f"![accuracy against MB]({PICTURE})\n", aimed(means),
    ]  # fmt: skip
    parts += [
        "## In full\n",
        filled(IN_FULL) + "\n",
    ]
    for dataset, condition in DETAILED:
        if (dataset, condition) in columns:
            parts += [f"### {dataset}, {conditions[condition]}\n", detail(means, names, dataset, condition)]
    parts += [
        "## Rates and differences\n",
        "Each rate is the best of three on digits, one seed; on Fashion-MNIST a twentieth: its inputs are larger.\n",
        differences(names, rates),
    ]
    path.write_text("\n".join(parts), encoding="utf-8")
    draw(path.with_name(PICTURE), means, list(jobs), "dirichlet")
