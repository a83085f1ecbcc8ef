"""Writes docs/tables/backcasts.md: published runs beside what the planner makes of their inputs."""

from pathlib import Path

from allstep.plan.backcasts import Backcast, backcasts

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
    for kind in ("known", "fitted", "guessed"):
        errors = [abs(cast.error) for cast in found if cast.inputs == kind]
        print(f"inputs {kind}: {len(errors)} rows, worst error {max(errors):.1%}")


if __name__ == "__main__":
    main()
