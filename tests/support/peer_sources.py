"""Another library's own sources, tests included, of the version that is installed: for its tests to run beside
ours, which have none of its code. Costs a download of some MB, once; kept in build/peers.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.folders import ROOT

KEPT = ROOT / "build" / "peers"


def sources(name):
    """The folder that the library's source distribution unpacks to.

    Raises:
        OSError: It cannot be had.
    """
    version = importlib.metadata.version(name)
    folder = KEPT / f"{name}-{version}"
    if folder.exists():
        return folder
    KEPT.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that nobody ever finds half of it there.
    with tempfile.TemporaryDirectory(dir=KEPT) as download:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
        ]
        command += ["--no-deps", "--no-binary", name, "--dest", download, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"no sources of {name} {version}: {done.stderr.strip()[-300:]}")
        with tarfile.open(next(Path(download).glob("*.tar.gz"))) as archive:
            archive.extractall(download, filter="data")
        try:
            (Path(download) / folder.name).rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    return folder
