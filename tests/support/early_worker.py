"""A process worker that imports shardrules before JAX, and uses a name of it after that."""

from __future__ import annotations

import shardrules as sr
from tests.support import process_worker

if __name__ == "__main__":
    assert sr.Rules
    process_worker.main({"end_early": process_worker.end_early})
