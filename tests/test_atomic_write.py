"""`write_text`: a reader sees either the old file or the whole new one, also after a failure."""

import errno
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import shardrules as sr
from shardrules._base import io
from shardrules._base.io import write_text
from tests.support.contexts import pseudo_terminal

ACL = "system.posix_acl_access"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes, links and devices of POSIX")


@pytest.fixture(autouse=True)
def _nothing_is_left_beside(tmp_path):
    yield
    assert list(tmp_path.rglob("*.part")) == []


def test_the_text_is_written_as_it_is(tmp_path):
    path = tmp_path / ("x" * 255)  # which leaves no room for letters more
    for text in ("é\r\nb\n", "", "shorter"):
        write_text(path, text)
        assert path.read_bytes() == text.encode()
    write_text(str(path), "a name that is a str")
    assert path.read_text() == "a name that is a str"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "a name that is a str"


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    link.symlink_to("there/target")
    for text in ("new", "newer"):  # at first the link leads to nothing
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="loop") as info:
        write_text(loop, "x")
    assert info.value.errno == errno.ELOOP


@pytest.mark.parametrize("special", [0, stat.S_ISUID, stat.S_ISGID])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o755, 0o444])
def test_the_mode_is_kept_but_new_content_does_not_run_as_somebody_else(tmp_path, mode, special):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(mode | special)
    write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "new"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_mode_of_a_new_file_is_the_umask_s(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "x", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


def access_list(user_rights, mask, group_rights):
    """A POSIX ACL with rights for the user 65534, as Linux has it in an extended attribute."""
    everyone = 0xFFFFFFFF
    entries = [(1, 6, everyone), (2, user_rights, 65534), (4, group_rights, everyone)]
    entries += [(0x10, mask, everyone), (0x20, 0, everyone)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def set_access_list(path, name, value):
    try:
        os.setxattr(path, name, value)
    except (AttributeError, OSError):
        pytest.skip("this system or file system has no POSIX ACLs")


def test_an_acl_is_kept_and_gives_the_group_no_rights(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o600)
    set_access_list(path, ACL, access_list(6, 6, 0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660  # the mask, and not the group's rights
    write_text(path, "new")
    assert path.read_text() == "new"
    assert os.getxattr(path, ACL) == access_list(6, 6, 0)


def test_no_one_else_reads_it_before_it_has_the_old_mode(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o600)
    modes = []

    def copy(target, part, before):
        modes.append(stat.S_IMODE(part.stat().st_mode))
        return copy_rights(target, part, before)

    copy_rights = io._copy_rights
    monkeypatch.setattr(io, "_copy_rights", copy)
    write_text(path, "new")
    assert modes == [0o600]


@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0 or os.name != "posix", reason="only root gives files away")
def test_the_owner_is_kept(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    os.chown(path, 1234, 4321)
    path.chmod(0o664)
    write_text(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)
    with mock.patch.object(os, "chown", side_effect=PermissionError):
        write_text(path, "newer")
    assert path.stat().st_gid != 4321
    assert stat.S_IMODE(path.stat().st_mode) == 0o604  # another group has no rights


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(io.os, "urandom", bytes)
    (tmp_path / f".{bytes(16).hex()}.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "x", "forged")
    assert victim.read_text() == "precious"
    monkeypatch.undo()
    names = set()  # of threads and containers on one disk, whose process numbers are the same
    monkeypatch.setattr(io.os, "replace", lambda part, target: names.add(Path(part).name) or part.rename(target))
    for _ in range(10):
        write_text(tmp_path / "a", "")
    assert len(names) == 10


def test_a_device_is_not_replaced():
    """As root, `--lock /dev/null` has made a file of it; no file can be made beside a terminal."""
    reads, writes = pseudo_terminal()
    name = os.ttyname(writes)
    write_text(name, "through")
    assert os.read(reads, 100) == b"through"
    assert stat.S_ISCHR(os.stat(name).st_mode)
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("mode", ["pipe", "wb", "ab"])
def test_standard_output_is_written_in_turn(tmp_path, mode):
    """By /dev/stdout `>> log` would have replaced the log."""
    code = (
        "from shardrules._base.io import write_text\n"
        "print('before'); write_text('/dev/stdout', 'text\\n'); print('after')"
    )
    log = tmp_path / "log"
    log.write_text("old\n")
    if mode == "pipe":
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    else:
        with log.open(mode) as file:
            subprocess.run([sys.executable, "-c", code], check=True, stdout=file)
        out = log.read_bytes()
    old = b"old\n" if mode == "ab" else b""
    assert out == old + b"before\ntext\nafter\n"


@pytest.mark.parametrize(
    "error", [SystemExit(143), KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "I/O error")]
)
@pytest.mark.parametrize("at", ["fsync", "replace", "open"])
def test_what_interrupts_leaves_the_old_file_alone(tmp_path, error, at):
    path = tmp_path / "x"
    path.write_text("old")
    with mock.patch.object(io.os, at, side_effect=error), pytest.raises(type(error)) as caught:
        write_text(path, "new")
    assert getattr(caught.value, "filename", str(path)) == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_is_told():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text("/dev/full", "x")


@pytest.mark.parametrize("name", ["none/x", "file/x", "."])
def test_where_no_file_can_be(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="directory: ") as info:
        write_text(tmp_path / name, "x")
    assert info.value.filename == str(tmp_path / name)


def test_locks_and_reports_are_written_so(tmp_path):
    plan = sr.plan({"w": np.zeros((2, 2))}, [(".*", None)], {"tp": 2})
    for name, make in (("x.lock", plan.lock), ("x.html", plan.to_html)):
        (tmp_path / name).symlink_to(f"target-{name}")
        text = make(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / f"target-{name}").read_text() == text
