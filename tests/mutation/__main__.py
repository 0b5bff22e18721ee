"""Prints the mutation score, what is not clean, and what is missed."""

from tests.mutation.cases import HELD_OUT, TUNED, cases
from tests.mutation.score import score, table

if __name__ == "__main__":
    scores = {"tuned on": score(cases(TUNED)), "held out": score(cases(HELD_OUT))}
    print(table(scores))
    for one in scores.values():
        print(f"\n{one.cases} cases, of which {len(one.unclean)} are not clean:")
        for case, found in one.unclean.items():
            print(f"  {case}", *(line.split("\n")[0] for line in found), sep="\n    ")
        for slips in one.missed.values():
            for case in slips:
                print(f"  missed: {case.model} on {case.mesh}: {case.what}")
