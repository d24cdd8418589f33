# SPDX-License-Identifier: Apache-2.0
"""Goal: tests/gpu/run works at the first chance: on the stand-ins all of its table is there and right, a failure makes it fail,
and what a machine lacks is named. Rates mean nothing here."""
import os
import re
import subprocess

from conftest import BUILD, ROOT

ROWS = ["plain memory, host to device", "plain memory, device to host", "pinned memory, host to device",
        "pinned memory, device to host", "hash, host, one core", "scratch file, written and synced, bounce",
        "scratch file, read, bounce", "scratch file, written and synced, cuFile", "scratch file, read, cuFile",
        "save: snapshot of device memory", "save: submit holds the caller's thread",
        "save: durable, compressed and encrypted", "restore into device memory", "feed to host memory", "feed to device memory",
        "feed to device memory, local files"]
ROWS_OF_KERNELS = ["hash, kernel", "pack, kernel, rows of 1.5 KiB with gaps", "unpack, kernel, rows of 1.5 KiB with gaps",
                   "pack, kernel, bf16, transposed", "unpack, kernel, bf16, transposed", "save: the caller's stream is blocked",
                   "feed to device memory, utilisation", "feed to device memory, local files, utilisation"]


def run(*words, folder=None, **more):
    env = {k: v for k, v in os.environ.items() if k not in ("LARDER_STANDIN", "LARDER_STANDIN_CUFILE", "MAKEFLAGS", "MAKELEVEL")}
    env.update(more, BUILD=str(BUILD.relative_to(ROOT)))
    where = ("-f", str(folder)) if folder else ()
    return subprocess.run(["tests/gpu/run", *words, *where], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300, text=True)


def rows_of(text):
    return {m.group(1): m.group(2) for m in re.finditer(r"^(\S.*?)  +(?:[-0-9.]+ (?:GB/s|ms|s|%) +)?(right|WRONG|FAILED)\b", text, re.M)}


def test_the_whole_table_on_the_stand_ins(tmp_path):
    done = run("--stand-in", "-m", "4", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "rates and ratios mean nothing" in done.stdout and "all bytes were right" in done.stdout
    expected = ROWS + ([] if "built without nvcc" in done.stdout else ROWS_OF_KERNELS)
    assert rows_of(done.stdout) == {name: "right" for name in expected}
    assert list(tmp_path.iterdir()) == [], "files stay"


def test_a_failure_makes_it_fail(tmp_path):
    done = run("--stand-in", "-m", "4", folder=tmp_path, LARDER_STANDIN_CUFILE="fail=write:1:5011")
    assert done.returncode == 1 and "something is wrong" in done.stdout, done.stdout
    rows = rows_of(done.stdout)
    assert [name for name, state in rows.items() if state != "right"] == ["cuFile"] and "cuFile says 5011" in done.stdout


def test_what_is_missing_is_named():
    done = run("-m", "4", LARDER_STANDIN="devices=0", LD_LIBRARY_PATH=str(BUILD / "tests/standin"))
    assert done.returncode == 77 and "NO_DEVICE" in done.stdout, done.stdout
    done = run(CC="no-such-compiler", LD_LIBRARY_PATH=str(BUILD / "tests/standin"), LARDER_STANDIN="devices=0")
    assert done.returncode == 77 and "Nothing can be built here (missing: gcc)" in done.stdout, done.stdout
