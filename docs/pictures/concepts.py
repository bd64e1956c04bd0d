"""The four pictures of docs/concepts.md: python docs/pictures/concepts.py (make reference).

Each has a ground of its own, light or dark as the reader's system is, so that it is legible on any page; and is narrow
enough to be read on a phone without zooming.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
WIDTH, MARGIN = 480, 24  # All lengths are in pixels.
LINE, NODE = 21, 17  # The distance of lines of text, and a node's radius.
LETTERS = 31  # The length of a line of text next to a drawing.
STYLE = """\
<style>
  svg { --ground: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #c4ccd4; --edge: #d8dee4;
        --blue: #0072b2; --orange: #b45f06; --green: #007a5a; --red: #c0341d; --node: #e8f1f8; }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #15181c; --ink: #e6e9ec; --soft: #a3adb8; --line: #4a545e; --edge: #30363d;
          --blue: #5ab4ec; --orange: #eaa53c; --green: #3fbf98; --red: #ff8a73; --node: #1d2b37; } }
  text { fill: var(--ink); font: 15px system-ui, sans-serif; }
  .soft { fill: var(--soft); } .bold { font-weight: 600; } .end { text-anchor: end; } .mid { text-anchor: middle; }
  line, path { stroke: var(--line); stroke-width: 1.5; fill: none; }
  .node { fill: var(--node); stroke: var(--blue); stroke-width: 2; }
  .new { fill: var(--node); stroke: var(--green); stroke-width: 2.5; }
  .head { fill: var(--node); stroke: var(--orange); stroke-width: 2.5; }
  .gone { fill: none; stroke: var(--red); stroke-width: 2; stroke-dasharray: 4 4; }
  .mix { stroke: var(--blue); stroke-width: 4; }
  .ask { stroke: var(--green); stroke-width: 2.5; stroke-dasharray: 6 5; }
  .give { stroke: var(--green); stroke-width: 4; }
  .cut { stroke: var(--red); stroke-width: 2.5; stroke-dasharray: 6 5; }
  .commit { stroke: var(--orange); stroke-width: 2.5; } .band { fill: var(--blue); opacity: 0.28; }
  .step { stroke: var(--soft); stroke-width: 2; } .life { stroke: var(--ink); stroke-width: 2; }
  .copy { fill: var(--green); } .point { fill: context-stroke; stroke: none; }
</style>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" markerHeight="10" orient="auto"
  markerUnits="userSpaceOnUse"><path d="M0 0 L10 5 L0 10 z" class="point"/></marker></defs>"""

MARKER = ' marker-end="url(#tip)"'

Point = tuple[float, float]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>'


def paragraph(x: float, y: float, words: str) -> list[str]:
    lines = textwrap.wrap(words, LETTERS)
    return [text(x, y + LINE * number, line) for number, line in enumerate(lines)]


def line(a: Point, b: Point, kind: str = "", tip: bool = False, short: float = 0.0) -> str:
    """Return a line from a to b that ends ``short`` pixels before both, to leave room for nodes."""
    length = math.dist(a, b)
    x, y = ((b[0] - a[0]) / length * short, (b[1] - a[1]) / length * short)
    where = f'x1="{a[0] + x:.1f}" y1="{a[1] + y:.1f}" x2="{b[0] - x:.1f}" y2="{b[1] - y:.1f}"'
    return f'<line {where} class="{kind}"{MARKER if tip else ""}/>'


def node(at: Point, name: str = "", kind: str = "node") -> list[str]:
    circle = f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{NODE}" class="{kind}"/>'
    return [circle, text(at[0], at[1] + 5, name, "mid bold" if kind != "gone" else "mid soft")]


def picture(height: float, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img">'
    )
    ground = (
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="10" '
        'style="fill: var(--ground); stroke: var(--edge)"/>'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, ground, *parts, "</svg>", ""])


def ring(centre: Point, radius: float, count: int) -> list[Point]:
    turns = (2 * math.pi * (number / count - 0.25) for number in range(count))
    return [(centre[0] + radius * math.cos(turn), centre[1] + radius * math.sin(turn)) for turn in turns]


def without_roles() -> str:
    left, right, y, radius = 124.0, 356.0, 158.0, 78.0
    parts = [text(left, 40, "Somebody in charge", "mid bold"), text(right, 40, "A swarm", "mid bold")]
    around = ring((left, y), radius, 7)
    parts += [line((left, y), other, "", short=NODE) for other in around]
    parts += [one for other in around for one in node(other)] + node((left, y), "0", "head")
    around = ring((right, y), radius, 8)
    pairs = {(0, 3), (1, 6), (4, 7)}
    for a in range(8):
        parts += [line(around[a], around[b], "", short=NODE) for b in range(a + 1, 8) if (a, b) not in pairs]
    parts += [line(around[a], around[b], "mix", short=NODE) for a, b in sorted(pairs)]
    parts += [one for other in around for one in node(other)]
    parts += [
        text(left, 284, "All wait for 0 and for the", "mid soft"),
        text(left, 305, "slowest. Without 0 all stop.", "mid soft"),
        text(right, 284, "Any two average, others", "mid soft"),
        text(right, 305, "train on. Any one may go.", "mid soft"),
    ]  # fmt: skip
    return picture(328, "A centre that all depend on, beside a swarm in which any two average", parts)


def exchange() -> str:
    a, b, top, bottom = 112.0, 368.0, 66.0, 520.0
    middle = (a + b) / 2
    parts = [text(a, 40, "node A", "mid bold"), text(b, 40, "node B", "mid bold")]
    for x, side in ((a, -1), (b, 1)):
        parts.append(line((x, top), (x, bottom), "life"))
        parts += [line((x, y), (x + 12 * side, y), "step") for y in range(int(top) + 12, int(bottom), 24)]
    for x, y in ((a, 78), (b, 150)):
        parts.append(f'<rect x="{x - 7}" y="{y - 7}" width="14" height="14" rx="2" class="copy"/>')
    parts += [
        line((a, 90), (b, 114), "ask", tip=True, short=8), text(middle, 84, "Offer", "mid bold"),
        line((b, 162), (a, 186), "ask", tip=True, short=8), text(middle, 160, "Accept", "mid bold"),
        f'<path d="M{a} 204 L{b} 228 L{b} 338 L{a} 314 z" class="band" style="stroke: none"/>',
        f'<path d="M{b} 204 L{a} 228 L{a} 338 L{b} 314 z" class="band" style="stroke: none"/>',
        text(middle, 260, "both send their weights", "mid bold"), text(middle, 281, "at once, in chunks,", "mid"),
        text(middle, 302, "while both train on", "mid"),
        line((a, 352), (b, 376), "commit", tip=True, short=8), line((b, 352), (a, 376), "commit", tip=True, short=8),
        text(middle, 394, "Commit, both ways", "mid bold"),
        text(middle, 415, "without both nothing happened", "mid soft"),
    ]  # fmt: skip
    for x in (a, b):
        parts.append(f'<circle cx="{x}" cy="438" r="8" style="fill: var(--blue)"/>')
    parts += [
        text(middle, 443, "the difference is added", "mid bold"),
        text(middle, 464, "at each one's next step", "mid"),
        line((MARGIN, 548), (MARGIN + 12, 548), "step"), text(MARGIN + 20, 553, "a step of training", "soft"),
        '<rect x="190" y="541" width="14" height="14" rx="2" class="copy"/>', text(212, 553, "a copy", "soft"),
        '<circle cx="298" cy="548" r="8" style="fill: var(--blue)"/>', text(314, 553, "the result lands", "soft"),
    ]  # fmt: skip
    return picture(
        576, "One exchange of two nodes: offer, accept, both streams, both commits, and what is added", parts
    )


Frame = tuple[list[str], str]
FIVE = dict(zip("ABCDE", ring((96.0, 0.0), 56.0, 5), strict=True))


def story(title: str, frames: list[Frame]) -> str:
    """Frames below each other: a small swarm, and what happens in it."""
    height, parts = 168.0, []
    for number, (swarm, words) in enumerate(frames):
        top = number * height
        if number:
            parts.append(line((MARGIN, top), (WIDTH - MARGIN, top)))
        parts += [f'<g transform="translate(0 {top + height / 2 + 6:.0f})">', *swarm, "</g>"]
        parts += [text(196, top + 40, str(number + 1), "bold soft"), *paragraph(216, top + 40, words)]
    return picture(height * len(frames), title, parts)


def swarm(edges: dict[str, str], kinds: dict[str, str] | None = None, leave_out: str = "") -> list[str]:
    """Nodes A to E with lines between some, as "AB": their kind, which ">" ends with a tip."""
    kinds = kinds or {}
    parts = []
    for (a, b), kind in edges.items():
        parts.append(line(FIVE[a], FIVE[b], kind.rstrip(">"), tip=kind.endswith(">"), short=NODE + 3))
    for name, at in FIVE.items():
        if name not in leave_out:
            parts += node(at, name, kinds.get(name, "node"))
    return parts


def death() -> str:
    dead = {"C": "gone"}
    return story("What happens when a node dies: one exchange is lost, the others go on", [
        (
            swarm({"CE": "mix", "AB": "mix"}),
            "C and E mix, A and B too. D trains. Nobody is first: C began the swarm, and is one of five since.",
        ),
        (
            swarm({"CE": "cut", "AB": "mix"}, dead),
            "C's power fails. E hears nothing more, gives this one exchange up, and keeps its weights. The others see "
            "nothing of it.",
        ),
        (
            swarm({"DE": "mix", "AC": "cut", "BC": "cut"}, dead),
            "E mixes with the next one. C answers no ping, nor those that others send for A: it is suspected, and then "
            "dead.",
        ),
        (
            swarm({"AE": "mix", "BD": "mix"}, leave_out="C"),
            "Four go on. C's share of the data is divided among them. What it had learned is in the weights of those "
            "it mixed with.",
        ),
    ])  # fmt: skip


def newcomer() -> str:
    new = {"E": "new"}
    return story("How a newcomer joins: one address is enough, the weights come from several", [
        (
            swarm({"ED": "ask>", "AB": "mix"}, new),
            "E starts with the address of one node, any one. It has the secret, and the same model.",
        ),
        (
            swarm({"EA": "ask>", "EB": "ask>", "EC": "ask>", "ED": "ask>"}, new),
            "D tells it who is there. E asks several what they hold: what most of them say counts, not what one says.",
        ),
        (
            swarm({"AE": "give>", "CE": "give>", "DE": "give>"}, new),
            "A piece of the weights and of the optimizer's state comes from each, at its next step. Who leaves is "
            "replaced.",
        ),
        (
            swarm({"EB": "mix", "CD": "mix"}),
            "E trains from there, mixes as all others do, and has a share of the data. It can be the next one's "
            "address.",
        ),
    ])  # fmt: skip


PICTURES = {"no-roles": without_roles, "exchange": exchange, "death": death, "newcomer": newcomer}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")
