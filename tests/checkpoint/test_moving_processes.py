"""Several real processes load, move and fail together; tests/support/moving_worker.py is what they run."""

from __future__ import annotations

import os

import pytest

from tests.place.test_processes import run
from tests.support.slow import slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a checkpoint in it."""
    save = pytest.importorskip("safetensors.numpy").save_file
    monkeypatch.setitem(os.environ, "SHARDRULES_TEST_FOLDER", str(tmp_path))
    from tests.support import moving_worker

    save(moving_worker.checkpoint(tmp_path), tmp_path / "m.safetensors")
    return tmp_path


WORKER = "tests.support.moving_worker"
SAMPLED = 9 * 64  # bytes of each array, by which processes see that they have the same files


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), slow(1, 8), slow(4, 2)])
def test_bit_equal_and_no_byte_too_many(folder, processes, devices):
    total = 0
    for process in run("load", processes, devices, folder, WORKER):
        for is_right, read, own in process["found"]:
            assert is_right
            # One process has nothing to compare.
            assert own <= read - SAMPLED * (processes > 1) <= 1.02 * own
        assert process["local"]
        total += process["found"][0][2]
    everything = 2 * (64 * 24 + 24 * 128 + 32 * 64 + 16 * 8 + 48 + 4 * 6 * 32)
    assert everything <= total <= everything + (processes - 1) * 2 * (16 * 8 + 48 + 4 * 6 * 32)


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_saved_by_all_and_refused_by_one(folder, processes):
    for process in run("save", processes, 4, folder, WORKER):
        assert process["right"]
        assert len(process["files"]) > 2
        assert process["left"] == [], process["error"]
        assert "No space left" in process["error"] or "process" in process["error"]


@pytest.mark.parametrize("processes", [slow(2), slow(4)])
def test_moved_and_back(folder, processes):
    for process in run("move", processes, 4, folder, WORKER):
        assert process["right"]


FAILURES = {
    "no file": "FileError: ",
    "cut": "FileError: ",
    "disk": "FileError: ",
    "progress": "KeyboardInterrupt",
    "bound": "ValueError: max_bytes_in_flight is -1",
    "shard_local": "ValueError: batch: ['x'] has the shape [3], and the devices of this process hold",
}
DIFFERENCES = {
    "rules": "not the same in process 0 and process",
    "reshard": "processes make different calls",
    "renames": "\n  the options: process 0 has strict=True, only='', missing={}, renames=",
    "only": "\n  the options: process 0 has strict=True, only=",
    "missing": "\n  the options: process 0 has strict=False, only='', missing={'new': 'float64[] ",
    "saved": "\n  renames: process 0 has ",
    "another model": "\n  the data of the files: process 0",
}
WHILE_READING = ("disk", "progress")


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_one_that_fails_makes_all_fail(folder, processes):
    found = run("fail", processes, 4, folder, WORKER)
    for rows in zip(*(process["found"] for process in found), strict=True):
        for index, (odd, case, error, next_is_right) in enumerate(rows):
            assert next_is_right, case
            if case in DIFFERENCES:
                assert DIFFERENCES[case] in error
            elif index == odd:
                assert error.startswith(FAILURES[case])
            else:
                when = "while it was reading" if case in WHILE_READING else "before anything was done"
                assert error.startswith(f"RuntimeError: load: process {odd} failed {when}: "), error
                assert FAILURES[case] in error


REFUSED = {
    "other cuts": "JAX moves it there only in the same cuts, to as many devices",
    "the same cuts": "this platform needs JAX's jax_cross_host_transfer_socket_address",
    "more devices": "only in the same cuts",
    "one device": "only in the same cuts",
    "renamed": "only in the same cuts",
    "keys": "JAX moves random keys only in the same order of the devices",
    "held by one": "only in the same cuts",
}


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_what_jax_does_not_move_between_processes_is_refused_by_all(folder, processes):
    """And nothing is moved or given up. What JAX moves, tests/place/test_processes.py moves."""
    refused = dict(REFUSED)
    if processes > 2:
        refused["order"] = "JAX does not change their order in a job of other processes too"
    for process in run("cross", processes, 4, folder, WORKER):
        for case, error in refused.items():
            assert error in process["errors"][case], case
        assert processes > 2 or process["errors"]["order"] is None
        assert process["kept"]
        assert process["alone"]
