"""Prints the score of steps: `python -m tests.steps tuned|fresh|blind|small [part of a step's name]`."""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
)


def main(group: str, name: str = "") -> None:
    """Print a row for each step, and what is told of each fault."""
    from tests.steps.score import score, warnings
    from tests.steps.table import steps

    selected = [step for step in steps(group) if name in step.name]
    table, costly, reported = [], 0, 0
    for row in score(selected):
        told = len(row.costly) - len(row.missed)
        costly, reported = costly + len(row.costly), reported + told
        names = [one for one in row.costly if any(f.level != "info" for f in row.new(row.costly[one]))]
        by_warning = len(names)
        table.append(
            f"| {row.step} | {len(row.outcomes)} | {len(row.costly)} | {told} | {by_warning} | "
            f"{len(warnings(row.clean))} | {row.clean.unexplained:.1%} |"
        )
        print(f"\n## {row.step}: {told} of {len(row.costly)} costly faults are told")
        print(f"clean: {row.clean.cost}, unexplained {row.clean.unexplained:.1%}")
        for finding in warnings(row.clean):
            print(f"  CLEAN WARNING {finding}")
        for fault, one in row.outcomes.items():
            if one.cost is None:
                print(f"- {fault}: refused by JAX: {one.error.splitlines()[0]}")
                continue
            is_costly, new = fault in row.costly, row.new(one)
            missed = "MISSED, as the clean step has such a warning" if one.findings else "MISSED"
            word = ("told" if new else missed) if is_costly else "told, cheap" if new else "cheap"
            print(f"- {fault}: {word}; {one.cost.over(row.clean.cost or one.cost)}", flush=True)
            for finding in new[:2]:
                print("    " + str(finding).replace("\n", "\n    ")[:600])
    heads = ("step", "faults", "costly", "told", "by a warning", "clean warnings", "clean unexplained bytes")
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", *table, sep="\n")
    print(f"told {reported} of {costly} costly faults ({reported / max(costly, 1):.1%})")


if __name__ == "__main__":
    main(*sys.argv[1:3])
