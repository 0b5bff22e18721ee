"""`python -m tests.packaging.wheel FILE`: what a wheel holds: the package as it is in the repository, and no more.

Says its sizes. Must not import the package: it runs where nothing but the build's requirements are.
"""

import sys
from pathlib import Path
from zipfile import ZipFile

PACKAGE = Path(__file__).parents[2] / "python"


def main(wheel: str) -> int:
    with ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    extension = [name for name in sizes if name.startswith("shardrules/_core.") and not name.endswith(".pyi")]
    told = {name for name in sizes if name.partition("/")[0].endswith(".dist-info")}
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    expected = {path.relative_to(PACKAGE).as_posix() for path in files}
    found = set(sizes) - told - set(extension)
    assert len(extension) == 1, extension
    assert found == expected, {"missing": expected - found, "too many": found - expected}
    # Data that is loaded by name and missed by no import.
    for needed in ("py.typed", "_core.pyi", "_base/hardware.toml"):
        assert f"shardrules/{needed}" in found, needed
    for needed in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f"/{needed}") for name in told), needed
    for suffix in (".html", ".css", ".js"):
        assert any(name.endswith(suffix) for name in found), suffix
    kilobytes = {"wheel": Path(wheel).stat().st_size, "unpacked": sum(sizes.values()),
                 "extension": sizes[extension[0]]}  # fmt: skip
    shown = ", ".join(f"{what} {size / 1000:.0f} kB" for what, size in kilobytes.items())
    print(f"{Path(wheel).name}: {len(sizes)} files, {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
