# SPDX-License-Identifier: Apache-2.0
"""Goal: a soak runs what it is asked for, counts what was reached, and never passes over a failure. Method: seconds of it on the
real proofs, and on programs that stand for a proof that fails and for one that tries nothing."""
import os
import re
import subprocess

from conftest import BUILD, ROOT


def soak(*words, build=BUILD):
    return subprocess.run([ROOT / "tests/soak/run", *map(str, words)], env=dict(os.environ, BUILD=str(build)), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


def stand_in(folder, script):
    program = folder / "tests/unit/server/store/retention"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    return folder


def test_seconds_of_a_soak():
    done = soak("--hours", 0.0005, "retention", "images")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^random retention sequences +\d{2,3},\d{3} +1,000,000 +\d+%$", done.stdout, re.M), done.stdout
    assert re.search(r"^crash images recovered +[1-9]\d* +10,000", done.stdout, re.M), done.stdout
    assert done.stdout.endswith("2 proofs, 0 failed\n")


def test_a_failure_is_told_and_how_to_see_it_again(tmp_path):
    done = soak("--hours", 0, "--seed", 77, "retention", build=stand_in(tmp_path, "echo 5 sequences; echo round 5 is wrong; exit 3\n"))
    assert done.returncode == 1
    assert "LARDER_TEST_SEED=77" in done.stdout and "round 5 is wrong" in done.stdout and str(tmp_path) in done.stdout
    assert done.stdout.endswith("1 proofs, 1 failed\n")


def test_what_cannot_be_tried_is_told(tmp_path):
    done = soak("--hours", 1, "retention", build=stand_in(tmp_path, "echo skipped, as this is no disk\n"))
    assert done.returncode == 0 and "nothing could be tried here\n    skipped, as this is no disk" in done.stdout


def test_an_unknown_proof_is_refused():
    done = soak("nonsense")
    assert done.returncode == 1 and "retention" in done.stdout
