"""A plot of the links between hosts: their latencies and rates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allstep.cli.output_files import new_figure


def draw_links(path: Path, links: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Writes a plot with a square for each pair of hosts.

    Args:
        path: ends in a kind of picture.
        links: (host, other) -> `probe`.
    """
    hosts = list(dict.fromkeys(one for one, _ in links))
    figure = new_figure(4 + len(hosts), 2.5 + len(hosts) / 2)
    panels = (
        ("there and back, us", "latency_s", 1e6, "viridis_r"),
        ("Mbit/s", "rate_bps", 1e-6, "viridis"),
    )
    for axes, (title, key, factor, colors) in zip(figure.subplots(1, 2), panels, strict=True):
        table = [
            [_number(links.get((one, other)), key, factor) for other in hosts] for one in hosts
        ]
        axes.imshow(table, cmap=colors)
        for row, numbers in enumerate(table):
            for column, number in enumerate(numbers):
                words = f"{number:.0f}" if number == number else "" if row == column else "none"
                axes.text(column, row, words, ha="center", va="center", backgroundcolor="#fffc")
        axes.set_xticks(range(len(hosts)), hosts, rotation=45, ha="right")
        axes.set_yticks(range(len(hosts)), hosts)
        axes.set(title=title, xlabel="to", ylabel="from")
    figure.savefig(path, dpi=150)


def _number(link: Mapping[str, Any] | None, key: str, factor: float) -> float:
    """A reading as a number; NaN where it was not measured."""
    return factor * link[key] if link and link[key] else float("nan")
