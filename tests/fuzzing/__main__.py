"""`python -m tests.fuzzing --seconds 300 [--target lock]`: each target for so long, on atheris.

A finding stops the run, with its traceback; its input is kept in build/fuzz/, to be put among the
target's seeds under a name that says what it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("build/fuzz")
NAMES = sorted(folder.name for folder in CORPUS.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=NAMES, help="this one alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if find_spec("atheris") is None:
        print("fuzzing needs atheris, which has wheels for Linux: pip install atheris")
        return 1
    if options.here:
        fuzz(options.target, options.seconds)
    for name in [options.target] if options.target else NAMES:
        command = [sys.executable, "-m", "tests.fuzzing", "--here", "--target", name]
        print(f"{name}: {options.seconds} seconds", flush=True)
        status = subprocess.call([*command, "--seconds", str(options.seconds)])
        if status != 0:
            return status
    return 0


def fuzz(name: str, seconds: int) -> None:
    """Does not come back: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["shardrules", "json"]):
        from tests.fuzzing.targets import TARGETS

    grown = FOUND / "corpus" / f"python_{name}"
    grown.mkdir(parents=True, exist_ok=True)
    atheris.Setup(
        [
            sys.argv[0], f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096",
            f"-artifact_prefix={FOUND}/{name}-", "-verbosity=0", "-print_final_stats=1",
            "-max_len=4096", str(grown), str(CORPUS / name),
        ],
        TARGETS[name],
    )  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
