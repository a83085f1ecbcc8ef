"""Published runs beside what the planner makes of their inputs; nothing is measured.

    python benchmarks/backcast.py

Writes docs/tables/backcasts.md and benchmarks/results/backcast.json.
"""

from dataclasses import asdict
from pathlib import Path

from common import print_headline, write_results
from published_runs import Backcast, backcasts

TABLE = Path(__file__).parents[1] / "docs" / "tables" / "backcasts.md"


def row(found: Backcast) -> str:
    cells = (
        found.run,
        found.what,
        f"{found.published:,.4g}",
        f"{found.predicted:,.4g}",
        f"{found.error:+.0%}",
        found.inputs,
        found.guesses,
        found.source,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    found = backcasts()
    lines = [
        "| run | what | published | predicted | error | inputs | guessed or fitted | source |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, found),
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_results("backcast", {"rows": [{**asdict(cast), "error": cast.error} for cast in found]})
    worst = {}
    for kind in ("known", "fitted", "guessed"):
        errors = [abs(cast.error) for cast in found if cast.inputs == kind]
        print(f"inputs {kind}: {len(errors)} rows, worst error {max(errors):.1%}")
        worst[f"worst_error_{kind}"] = max(errors)
    print_headline(**worst)


if __name__ == "__main__":
    main()
