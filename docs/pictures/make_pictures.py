"""The pictures of README and docs, as SVG text: ``python docs/pictures/make_pictures.py`` writes them beside itself.

They have a white background of their own, so that they can be read on dark pages too. ``tests/docs/test_pictures.py``
holds the committed files against this script.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 880
INK, MUTED, LINE, PANEL, REST = "#1f2328", "#57606a", "#d0d7de", "#f6f8fa", "#c9d1d9"
BLUE, GREEN, ORANGE, PURPLE = "#0969da", "#1a7f37", "#bc4c00", "#8250df"
PALE = {BLUE: "#ddf4ff", GREEN: "#dafbe1", ORANGE: "#fff1e5", PURPLE: "#fbefff", REST: "#eaeef2"}
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


class Picture:
    """Elements in the order of drawing. Coordinates are pixels from the upper left corner."""

    def __init__(self, height: int, title: str, description: str) -> None:
        self.height, self.title, self.description = height, title, description
        self.elements: list[str] = []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, fill="#ffffff", stroke=LINE, radius=12)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 4,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{stroke}"{dashes}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 13, colour: str = INK, bold: bool = False,
        anchor: str = "start",
    ) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def lines(self, x: float, y: float, texts: Iterable[str], size: float = 12, colour: str = MUTED) -> None:
        for number, text in enumerate(texts):
            self.text(x, y + number * (size + 4), text, size, colour)

    def row(self, x: float, y: float, colour: str, label: str = "", width: float = 64) -> None:
        """A row of a tensor."""
        self.box(x, y, width, 18, fill=PALE[colour], stroke=colour, radius=3)
        self.text(x + width / 2, y + 13, label, 12, INK, anchor="middle")

    def rows(self, x: float, y: float, count: int, width: float = 64) -> None:
        """Rows of other tokens, below one another."""
        for number in range(count):
            self.box(x, y + 13 * number, width, 9, fill=PALE[REST], stroke=REST, radius=2)

    def heading(self, x: float, y: float, width: float, colour: str, label: str) -> None:
        self.box(x, y, width, 26, fill=colour, radius=6)
        self.text(x + width / 2, y + 18, label, 14, "#ffffff", bold=True, anchor="middle")

    def step(self, x: float, y: float, number: int, colour: str) -> None:
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{colour}"/>')
        self.text(x, y + 4, str(number), 12, "#ffffff", bold=True, anchor="middle")

    def arrow(self, points: list[tuple[float, float]], colour: str, dashed: bool = False, width: float = 2) -> None:
        """Along the points; more than two make bends."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self._stroke(path, colour, dashed, width)

    def curve(self, start: tuple[float, float], end: tuple[float, float], colour: str, dashed: bool = False) -> None:
        """From left to right, level at both ends."""
        (x0, y0), (x1, y1) = start, end
        middle = (x0 + x1) / 2
        self._stroke(f"M{x0:g} {y0:g} C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}", colour, dashed, 2)

    def _stroke(self, path: str, colour: str, dashed: bool, width: float) -> None:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes} '
            f'marker-end="url(#head{colour[1:]})"/>'
        )

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="head{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>\n'
            for colour in (BLUE, GREEN, ORANGE, PURPLE, MUTED)
        )
        body = "\n".join(self.elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
            f"<defs>\n{heads}</defs>\n{body}\n</svg>\n"
        )


def dispatch_combine() -> str:
    """What the two operations do with one token: 3 ranks, 2 experts on each."""
    picture = Picture(
        456,
        "What dispatch and combine do",
        "A token of rank 0 chooses experts 2 and 3 of rank 1 and expert 4 of rank 2. Dispatch sends its row once to "
        "each of these ranks. The experts work. Combine adds up the rows of a rank there, sends one row home from each "
        "rank, and rank 0 adds them in the order of ranks.",
    )
    picture.heading(20, 18, 344, BLUE, "dispatch")
    picture.heading(376, 18, 172, GREEN, "your experts")
    picture.heading(560, 18, 300, ORANGE, "combine")
    picture.lines(
        22, 62, ["A row goes once to each rank that has an expert", "of its token, and is placed by expert there."]
    )
    picture.lines(378, 62, ["They work on rows", "sorted by expert."])
    picture.lines(
        562, 62, ["Each rank adds up its experts' rows of a token", "and sends one row home; home adds the ranks."]
    )

    tops = [96, 214, 332]
    for rank, top in enumerate(tops):
        picture.box(12, top, WIDTH - 24, 108, fill=PANEL, stroke=LINE, radius=8)
        picture.text(24, top + 22, f"rank {rank}", 13, bold=True)
        for place in (0, 1):
            y = top + 10 + 46 * place
            picture.box(376, y, 172, 42, fill="#ffffff", stroke=GREEN, radius=5)
            picture.text(382, y + 14, f"expert {2 * rank + place}", 11, GREEN)

    # Tokens at home. The first one of rank 0 is followed.
    picture.row(24, tops[0] + 36, BLUE, "token x", width=92)
    picture.lines(24, tops[0] + 72, ["chooses experts", "2, 3 and 4"], 12, BLUE)
    for top in tops[1:]:
        picture.rows(24, top + 38, 3, width=92)
        picture.text(24, top + 96, "its own tokens", 12, MUTED)

    # Dispatch: one row a rank, then a copy for each expert.
    arrived = {1: tops[1] + 53, 2: tops[2] + 30}
    for y in arrived.values():
        picture.curve((116, tops[0] + 45), (262, y + 9), BLUE)
        picture.row(264, y, BLUE, "x")
    picture.lines(240, tops[1] + 24, ["one row, although", "two experts want it"], 12, BLUE)
    places = {2: tops[1] + 30, 3: tops[1] + 76, 4: tops[2] + 30}
    for expert, y in places.items():
        rank = expert // 2
        picture.curve((328, arrived[rank] + 9), (442, y + 9), BLUE)
        picture.row(444, y, BLUE, "x", width=36)
        picture.arrow([(480, y + 9), (500, y + 9)], GREEN)
        picture.row(502, y, GREEN, f"y{_sub(expert)}", width=38)

    # Combine: weighted sums of a rank, home, in the order of ranks.
    sums = {1: (tops[1] + 53, "w₂y₂ + w₃y₃"), 2: (tops[2] + 30, "w₄y₄")}
    for expert, y in places.items():
        rank = expert // 2
        picture.curve((540, y + 9), (584, sums[rank][0] + 9), ORANGE)
    for rank, (y, formula) in sums.items():
        picture.row(586, y, ORANGE, f"p{_sub(rank)}")
        picture.text(586, y + 34, f"= {formula}", 12, MUTED)
    for y, _ in sums.values():
        picture.curve((650, y + 9), (758, tops[0] + 45), ORANGE)
    picture.row(760, tops[0] + 36, ORANGE, "y = p₁ + p₂", width=92)
    picture.lines(760, tops[0] + 72, ["in rank order:", "the same bits", "every time"], 12, ORANGE)
    return picture.svg()


def token_path() -> str:
    """How a row travels in low latency and in high throughput."""
    picture = Picture(
        700,
        "How one token travels in low latency and in high throughput",
        "Low latency: the sender stores the row into a slot of the receiver's window, the words of the row announce "
        "themselves, and the receiver copies the row to its place. High throughput: ranks exchange counts first, then "
        "the sender stores the row at its final place in the receiver's output. Another domain gets the row once, over "
        "the rail, and hands it out.",
    )
    _low_latency(picture, 16)
    _high_throughput(picture, 304)
    return picture.svg()


def _rank(picture: Picture, x: float, y: float, width: float, height: float, label: str) -> None:
    picture.box(x, y, width, height, fill=PANEL, stroke=LINE, radius=8)
    picture.text(x + 12, y + 20, label, 13, bold=True)


def _output(picture: Picture, x: float, y: float, width: float, taken: int) -> None:
    """Three rows of an output tensor, one of which is the token's."""
    for place in range(3):
        mine = place == taken
        colour = BLUE if mine else REST
        picture.box(x, y + 20 * place, width, 18, fill=PALE[BLUE] if mine else "#ffffff", stroke=colour, radius=3)
    picture.text(x + width / 2, y + 20 * taken + 13, "row t", 12, anchor="middle")


def _steps(picture: Picture, y: float, columns: list[tuple[float, list[tuple[int, str, list[str]]]]]) -> None:
    """What the numbers in the picture mean: columns of (number, colour, lines)."""
    for x, steps in columns:
        at = y
        for number, colour, texts in steps:
            picture.step(x + 9, at - 4, number, colour)
            picture.lines(x + 26, at, texts, 12, INK)
            at += 16 * len(texts) + 8


def _low_latency(picture: Picture, top: float) -> None:
    picture.heading(16, top, 130, BLUE, "low latency")
    picture.text(158, top + 18, "Nothing is exchanged before the row leaves. The receiver copies it to its place.", 13)
    _rank(picture, 16, top + 40, 190, 152, "rank 0, the sender")
    _rank(picture, 268, top + 40, 596, 152, "rank 1, the receiver")
    picture.row(28, top + 106, BLUE, "row t", width=120)
    picture.row(28, top + 160, PURPLE, "ids, weights", width=120)

    # The slots of rank 1: a line for each source rank, that of rank 0 the last.
    picture.text(482, top + 76, "slots (source, token)", 12, MUTED, anchor="middle")
    for line in range(3):
        for token in range(5):
            mine = line == 2 and token == 0
            x, y = 384 + 40 * token, top + 84 + 20 * line
            picture.box(x, y, 36, 16, fill=PALE[BLUE] if mine else "#ffffff", stroke=BLUE if mine else REST, radius=3)
    picture.text(402, top + 136, "row t", 11, anchor="middle")
    picture.curve((148, top + 115), (382, top + 132), BLUE)
    picture.step(237, top + 119, 1, BLUE)
    picture.row(384, top + 160, PURPLE, "ids, weights of all ranks", width=196)
    picture.arrow([(148, top + 169), (382, top + 169)], PURPLE)
    picture.step(237, top + 169, 1, PURPLE)

    picture.text(778, top + 76, "output", 12, MUTED, anchor="middle")
    _output(picture, 708, top + 84, 140, taken=1)
    picture.arrow([(402, top + 140), (402, top + 149), (620, top + 149), (620, top + 113), (706, top + 113)], BLUE)
    picture.step(660, top + 113, 3, BLUE)
    picture.arrow([(580, top + 169), (778, top + 169), (778, top + 146)], PURPLE, dashed=True)
    picture.step(660, top + 169, 2, PURPLE)
    _steps(
        picture,
        top + 216,
        [
            (16, [
                (1, BLUE, ["The sender stores the row into slot (0, t) of each rank that", "has an expert of it."]),
                (1, PURPLE, ["Ids and weights go to the ranks beside the rows."]),
            ]),
            (440, [
                (2, PURPLE, ["The ids of all ranks tell where each row belongs."]),
                (3, BLUE, ["A slot rests full of one special word. Any other word has", "arrived: no flag, no fence. "
                           "The receiver copies the row."]),
            ]),
        ],
    )  # fmt: skip


def _high_throughput(picture: Picture, top: float) -> None:
    picture.heading(16, top, 150, ORANGE, "high throughput")
    picture.text(178, top + 18, "Counts first. Then the row is stored once, where it stays. Here: two domains.", 13)
    for x, label in ((16, "domain 0"), (464, "domain 1")):
        picture.box(x, top + 40, 400, 208, fill="#ffffff", stroke=MUTED, radius=10, dashed=True)
        picture.text(x + 12, top + 60, label, 13, MUTED, bold=True)
    _rank(picture, 28, top + 70, 160, 166, "rank 0, the sender")
    _rank(picture, 244, top + 70, 160, 166, "rank 1")
    _rank(picture, 476, top + 70, 160, 166, "rank 2, rail peer")
    _rank(picture, 692, top + 70, 160, 166, "rank 3")

    picture.row(40, top + 104, ORANGE, "counts", width=120)
    picture.row(40, top + 152, BLUE, "row t", width=120)
    picture.row(40, top + 206, PURPLE, "metadata", width=120)
    picture.row(256, top + 104, ORANGE, "counts", width=136)
    _output(picture, 256, top + 132, 136, taken=1)
    picture.row(256, top + 206, PURPLE, "metadata", width=136)
    picture.arrow([(160, top + 109), (254, top + 109)], ORANGE)
    picture.arrow([(256, top + 117), (162, top + 117)], ORANGE)
    picture.step(216, top + 113, 1, ORANGE)
    picture.arrow([(100, top + 122), (100, top + 150)], ORANGE, dashed=True)
    picture.step(116, top + 137, 2, ORANGE)
    picture.arrow([(160, top + 161), (254, top + 161)], BLUE)
    picture.step(216, top + 161, 3, BLUE)
    picture.arrow([(160, top + 215), (254, top + 215)], PURPLE)
    picture.step(216, top + 215, 3, PURPLE)

    _output(picture, 488, top + 104, 136, taken=2)
    picture.row(488, top + 206, BLUE, "row t, from the rail", width=136)
    _output(picture, 704, top + 104, 136, taken=0)
    picture.arrow([(556, top + 206), (556, top + 164)], BLUE)
    picture.curve((624, top + 215), (702, top + 113), BLUE)
    picture.step(556, top + 184, 5, BLUE)
    picture.step(664, top + 162, 5, BLUE)
    picture.arrow([(28, top + 161), (22, top + 161), (22, top + 266), (556, top + 266), (556, top + 226)], BLUE)
    picture.step(440, top + 266, 4, BLUE)
    _steps(
        picture,
        top + 304,
        [
            (16, [
                (1, ORANGE, ["Each rank tells all others how many rows it will send."]),
                (2, ORANGE, ["From the counts a sender works out where its rows will lie."]),
                (3, BLUE, ["The row is stored at that place in the output. Its metadata",
                           "(ids, weights) goes into a slot."]),
            ]),
            (440, [
                (4, BLUE, ["Another domain gets the row once, over the rail."]),
                (5, BLUE, ["The rail peer hands it out in its own domain."]),
            ]),
        ],
    )  # fmt: skip


def _sub(number: int) -> str:
    return "₀₁₂₃₄₅₆₇₈₉"[number]


PICTURES = {"dispatch_combine.svg": dispatch_combine, "token_path.svg": token_path}


def main() -> None:
    for name, make in PICTURES.items():
        Path(__file__).with_name(name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
