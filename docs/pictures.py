"""The pictures of the documentation, drawn from benchmark results and from the tables they explain.

    python docs/pictures.py

writes docs/pictures/*.svg. A picture follows the reader's light or dark theme by itself; the chart of README.md is
written twice, since GitHub picks one of two files. tests/docs checks that the committed files are current.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"

LIGHT = {"ink": "#1b1d20", "muted": "#5a6068", "line": "#c9ccd1", "card": "#ffffff", "faint": "#eceef1"}
LIGHT |= {
    "blue": "#2f62ad",
    "orange": "#b3641a",
    "green": "#2e7d57",
    "violet": "#7a54a6",
    "grey": "#8b929a",
    "on": "#ffffff",
}
DARK = {"ink": "#e9e9e6", "muted": "#a5abb3", "line": "#454a51", "card": "#0d1117", "faint": "#24272b"}
DARK |= {
    "blue": "#7aa7e8",
    "orange": "#e0a05c",
    "green": "#6cc39a",
    "violet": "#b99be3",
    "grey": "#737a83",
    "on": "#101113",
}
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif'


@dataclass
class Picture:
    """An SVG under construction; colours are names of the palette."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "", radius: float = 4
    ) -> None:
        """Add a rectangle."""
        outline = f' class="s-{line}" stroke-width="1.2"' if line else ""
        style = f' style="fill: var(--{fill})"' if fill != "none" else ' style="fill: none"'
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"{outline}{style}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        fill: str = "ink",
        anchor: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """Add a line of text."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} '
            f'style="fill: var(--{fill})">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], colour: str = "muted", dashed: bool = False) -> None:
        """Add a line through some points that ends in an arrow head."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" style="fill: none; stroke: var(--{colour})" stroke-width="1.6"{dash} '
            f'marker-end="url(#head-{colour})"/>'
        )

    def svg(self, palette: dict[str, str] | None = None) -> str:
        """Return the file: in one palette, or in the reader's."""
        light = "".join(f"--{name}: {value}; " for name, value in (palette or LIGHT).items())
        style = f":root {{ {light}}}"
        if palette is None:
            dark = "".join(f"--{name}: {value}; " for name, value in DARK.items())
            style += f" @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
        style += " .s-line { stroke: var(--line); } .s-blue { stroke: var(--blue); } .s-muted { stroke: var(--muted); }"
        heads = "".join(
            f'<marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            f'<path d="M0 0L8 4L0 8Z" style="fill: var(--{name})"/></marker>'
            for name in ("muted", "blue", "orange", "green")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}" font-family=\'{FONT}\'>\n'
            f"<title>{escape(self.title)}</title>\n<style>{style}</style>\n<defs>{heads}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="8" style="fill: var(--card)"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


# -- the chart of README.md --


def rows_of(name: str, section: str) -> dict[str, list[str]]:
    """Return the rows of a section's table in a page of results, by their first cell."""
    text = (RESULTS / name).read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells[2:]}


OFFLOADED = [  # section, system in the results, label
    ("1.3b, 8x1024, clip 1", "zerostd, states host, speculating", "zerostd, speculative updates"),
    ("1.3b, 8x1024, clip 1", "zerostd, states host", "zerostd"),
    ("1.3b, 8x1024, clip 1", "DeepSpeed 0.19.8 ZeRO-2, optimizer on CPU", "DeepSpeed 0.19.8 ZeRO-2"),
    ("1.3b, 8x1024, clip 1", "FSDP2, CPUOffloadPolicy, fused CPU AdamW", "FSDP2, CPUOffloadPolicy"),
    ("1.3b, 8x1024, no clip", "zerostd, states host", "zerostd"),
    ("1.3b, 8x1024, no clip", "torchao 0.18.0 CPUOffloadOptimizer, bf16 without masters", "torchao 0.18.0, no masters"),
]


def offload_chart() -> Picture:
    """Return the step times of one job, system by system."""
    picture = Picture(820, 330, "Seconds per training step with optimizer states in host memory, by system")
    picture.text(20, 28, "Seconds per step, optimizer states in host memory", size=16, bold=True)
    picture.text(
        20, 48, "GPT, 1.34 B parameters, 8 x 1024 tokens, one NVIDIA H200, bf16. Shorter is better.", fill="muted"
    )
    left, scale, y, section = 240, 270.0, 66, ""
    for x, head in ((720, "device"), (800, "host")):
        picture.text(x, y + 20, head, fill="muted", anchor="end", bold=True)
    for name, system, label in OFFLOADED:
        step, device, host = (float(rows_of("offload-1.3b.md", name)[system][place]) for place in (0, 6, 7))
        if name != section:
            section = name
            y += 20
            heading = "without clipping" if "no clip" in name else "with gradient clipping"
            picture.text(20, y, heading, fill="muted", bold=True)
            y += 8
        is_ours = label.startswith("zerostd")
        picture.text(left - 10, y + 17, label, anchor="end", bold=is_ours)
        picture.box(left, y + 2, step * scale, 22, "blue" if is_ours else "grey", radius=3)
        picture.text(left + step * scale + 8, y + 17, f"{step:.3f} s", bold=is_ours)
        for x, size in ((720, device), (800, host)):
            picture.text(x, y + 17, f"{size:.1f} GiB", fill="muted", anchor="end")
        y += 31
    return picture


# -- what the stages shard --

STAGES = ["0: data parallel", "1: optimizer states", "2: and gradients", "3: and parameters"]
FORMULAS = ["16 P", "4 P + 12 P/N", "2 P + 14 P/N", "16 P/N"]


def stages() -> Picture:
    """Return what each of four ranks holds at each stage."""
    picture = Picture(820, 330, "What each of four ranks holds at ZeRO stages 0 to 3")
    kinds = [("parameters", 2, "blue", 3), ("gradients", 2, "orange", 2), ("optimizer states", 12, "green", 1)]
    unit = 11.0
    for index, (kind, _, colour, _) in enumerate(kinds):
        picture.box(20 + 130 * index, 14, 14, 14, colour, radius=2)
        picture.text(40 + 130 * index, 26, kind, fill="muted")
    for stage in range(4):
        left = 20 + stage * 200
        picture.text(left, 58, f"Stage {STAGES[stage]}", bold=True)
        picture.text(left, 78, f"{FORMULAS[stage]} bytes per rank", fill="muted")
        for rank in range(4):
            x, y = left + rank * 44, 92.0
            for _, size, colour, first in kinds:
                height = size * unit
                is_sharded = stage >= first
                picture.box(x, y, 36, height, "none" if is_sharded else colour, line="line", radius=2)
                if is_sharded:
                    picture.box(x, y + rank * height / 4, 36, height / 4, colour, radius=2)
                y += height + 4
            picture.text(x + 18, y + 14, f"rank {rank}", fill="muted", anchor="middle", size=11)
    picture.text(
        20,
        320,
        "P parameters, N ranks, 16-bit training with AdamW. An outline is state that other ranks hold.",
        fill="muted",
    )
    return picture


# -- tiers and routes --


def tiers() -> Picture:
    """Return the three tiers and the ways of an update."""
    picture = Picture(820, 340, "Tiers of memory and the routes of an optimizer update")
    rows = [
        ("device", "GPU memory: fastest, smallest", 40),
        ("host", "pinned RAM", 150),
        ("disk", "NVMe files: slowest, largest", 260),
    ]
    for name, note, y in rows:
        picture.box(20, y, 780, 62, "faint", line="line", radius=8)
        picture.text(36, y + 27, name, bold=True, size=15)
        picture.text(36, y + 47, note, fill="muted")
    picture.text(
        20,
        26,
        "An update needs gradients, fp32 masters and optimizer states. Its route says where it is computed.",
        fill="muted",
    )
    for x, name in ((312, "resident"), (462, "streamed")):
        picture.text(x, 60, name, anchor="middle", bold=True)
    picture.box(270, 66, 84, 28, "blue")
    picture.text(312, 85, "update", fill="on", anchor="middle")
    picture.box(420, 66, 84, 28, "orange")
    picture.text(462, 85, "update", fill="on", anchor="middle")
    picture.box(420, 172, 84, 28, "orange")
    picture.text(462, 191, "states", fill="on", anchor="middle")
    picture.arrow((440, 172), (440, 97), colour="orange")
    picture.arrow((484, 94), (484, 169), colour="orange")
    picture.text(496, 138, "tile by tile", fill="muted", size=12)
    picture.text(682, 168, "cpu", anchor="middle", bold=True)
    picture.box(640, 174, 84, 28, "green")
    picture.text(682, 193, "update", fill="on", anchor="middle")
    picture.arrow((660, 96), (660, 158), colour="green")
    picture.text(652, 132, "gradient", fill="muted", size=12, anchor="end")
    picture.arrow((704, 158), (704, 96), colour="green")
    picture.text(712, 132, "parameters", fill="muted", size=12)
    picture.box(540, 278, 184, 28, "grey")
    picture.text(632, 297, "states", fill="on", anchor="middle")
    picture.arrow((560, 278), (560, 215), colour="muted")
    picture.arrow((600, 215), (600, 275), colour="muted")
    picture.text(612, 245, "read early, written later", fill="muted", size=12)
    return picture


# -- overlap --


def overlap() -> Picture:
    """Return a step whose updates run beside backward and the next forward."""
    picture = Picture(820, 250, "Backward, update and the next forward overlap")
    lanes = ["device", "link down", "CPU updates", "link up"]
    for index, lane in enumerate(lanes):
        y = 52 + index * 46
        picture.text(20, y + 20, lane)
        picture.box(120, y, 680, 32, "faint", radius=3)
    names = "dcba"
    for index, name in enumerate(names):
        start = 124 + index * 74
        for lane, (offset, width, colour) in enumerate(
            ((0, 70, "blue"), (76, 34, "orange"), (114, 66, "green"), (184, 34, "orange"))
        ):
            y = 52 + lane * 46
            picture.box(start + offset, y + 3, width, 26, colour, radius=3)
            picture.text(start + offset + width / 2, y + 20, name, fill="on", anchor="middle")
    for index, name in enumerate("abcd"):
        start = 124 + 3 * 74 + 222 + index * 56
        picture.box(start, 55, 52, 26, "violet", radius=3)
        picture.text(start + 26, 72, name, fill="on", anchor="middle")
    picture.text(124, 40, "backward, last group first", fill="muted")
    picture.text(124 + 3 * 74 + 222, 40, "next forward, first group first", fill="muted")
    picture.text(
        20,
        242,
        "a to d are groups. A group's next forward waits for its own update only. Results equal a serial step's.",
        fill="muted",
    )
    return picture


# -- the planner's loop --


def planner() -> Picture:
    """Return how a plan comes about and changes."""
    picture = Picture(820, 260, "The planner's loop")
    boxes = [
        (20, 40, "measure", "machine and model", "faint"),
        (226, 40, "linear program", "shares of each tier", "blue"),
        (432, 40, "simulate", "one step, lane by lane", "blue"),
        (638, 40, "plan", "homes, routes, cost", "green"),
        (638, 160, "train", "real steps", "faint"),
        (432, 160, "watch", "step time, memory", "faint"),
        (226, 160, "try candidates", "a few real steps each", "orange"),
    ]
    for x, y, name, note, fill in boxes:
        is_dark = fill != "faint"
        picture.box(x, y, 162, 56, fill, line="" if is_dark else "line", radius=8)
        picture.text(x + 81, y + 25, name, anchor="middle", bold=True, fill="on" if is_dark else "ink")
        picture.text(x + 81, y + 44, note, anchor="middle", size=12, fill="on" if is_dark else "muted")
    for x in (182, 388, 594):
        picture.arrow((x, 68), (x + 42, 68))
    picture.arrow((719, 98), (719, 157))
    picture.arrow((636, 188), (597, 188))
    picture.arrow((430, 188), (391, 188))
    picture.arrow((307, 158), (307, 99))
    picture.text(318, 132, "measured rates", fill="muted", size=12)
    picture.text(20, 28, "before training", fill="muted", bold=True)
    picture.text(20, 188, "while training", fill="muted", bold=True)
    picture.text(
        20,
        246,
        "A new plan moves state between steps and changes no value. The fastest candidate stays.",
        fill="muted",
    )
    return picture


# -- the rooms --


def rooms() -> Picture:
    """Return the rooms of the library as docs/design.md lists them, in the order of the data's path."""
    table = (ROOT / "docs" / "design.md").read_text().split("| room under `src/zerostd/` | duty |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, flags=re.MULTILINE)
    picture = Picture(920, 50 + 26 * len(rows), "The rooms of zerostd, in the order of the data's path")
    picture.text(20, 26, "A room imports only from rooms above it.", fill="muted")
    for index, (names, duty) in enumerate(rows):
        y = 38 + 26 * index
        picture.box(20, y, 880, 23, "faint", radius=4)
        picture.box(20, y, 5, 23, ("grey", "green", "orange", "blue", "violet")[index * 5 // len(rows)], radius=2)
        picture.text(34, y + 16, names.replace("`", ""), bold=True, size=12)
        picture.text(254, y + 16, duty.replace("`", ""), size=12, fill="muted")
    return picture


def files() -> dict[str, str]:
    """Return all pictures by their file names."""
    chart = offload_chart()
    made = {"stages": stages(), "tiers": tiers(), "overlap": overlap(), "planner": planner(), "rooms": rooms()}
    return {
        "offload-light.svg": chart.svg(LIGHT),
        "offload-dark.svg": chart.svg(DARK),
        **{f"{name}.svg": picture.svg() for name, picture in made.items()},
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
