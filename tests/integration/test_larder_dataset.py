# SPDX-License-Identifier: Apache-2.0
"""larder dataset and larder feed: import, list, read back, order, and archives that are not whole."""
import io
import json
import os
import random
import tarfile

import pytest
from conftest import CORRUPT, DENIED, MISSING, OK, OTHER, USAGE, write_safetensors


def make_tar(path, samples, form=tarfile.USTAR_FORMAT):
    """samples: list of (key, {ext: bytes})."""
    with tarfile.open(path, "w", format=form) as tar:
        for key, fields in samples:
            for ext, raw in fields.items():
                info = tarfile.TarInfo(f"{key}.{ext}")
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder, r, paths = tmp_path_factory.mktemp("shards"), random.Random(3), []
    for i in range(3):
        path = folder / f"shard-{i}.tar"
        make_tar(path, [(f"doc{i}-{k:03}", {"txt": r.randbytes(r.randrange(2000)), "cls": b"%d" % k})
                        for k in range(10 + i)])
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def imported(server, shards):
    done = server.json("dataset", "import", "docs", *shards, role="writer")
    assert done == {"dataset": "docs", "version": 1, "shards": 3}
    return shards


def test_ls(server, imported):
    listed = {d["name"]: d for d in server.json("dataset", "ls")}
    assert listed["docs"]["commits"] == 1 and not listed["docs"]["published"]
    got = server.json("dataset", "ls", "docs")
    assert [(s["name"], s["samples"], s["bytes"]) for s in got["shards"]] == [
        (p.name, 10 + i, p.stat().st_size) for i, p in enumerate(imported)]
    assert got["version"] == 1 and got["samples"] == 33 and len(got["versions"]) == 1
    assert "shard-1.tar" in server.larder("dataset", "ls", "docs").stdout


def test_cat(server, imported, tmp_path):
    for path in imported:
        done = server.larder("dataset", "cat", "docs", path.name, role="reader", binary=True)
        assert done.stdout == path.read_bytes() and done.stderr == b""
    raw = imported[0].read_bytes()
    for offset, length in ((0, 1), (511, 2), (1000, 5000), (len(raw) - 3, 100), (len(raw), 5)):
        done = server.larder("dataset", "cat", "docs", imported[0].name, "--offset", offset, "--length", length, binary=True)
        assert done.stdout == raw[offset:offset + length]
    server.larder("dataset", "cat", "docs", "absent.tar", status=MISSING)
    server.larder("dataset", "cat", "absent", imported[0].name, status=MISSING)
    server.larder("dataset", "cat", "docs", imported[0].name, "--offset", len(raw) + 1, status=USAGE)


@pytest.mark.parametrize("level", ["structure", "scrub", "deep"])
def test_verify(server, imported, level):
    got = server.json("dataset", "verify", "docs", "--level", level)
    assert got["damaged"] == 0 and got["objects_good"] >= 3
    server.larder("dataset", "verify", "docs", "--version", 9, status=MISSING)


def test_verify_all_is_datasets_only(own_server, shards, tmp_path):
    own_server.larder("dataset", "import", "docs", *shards)
    write_safetensors(tmp_path / "m.safetensors", {"t": ("U8", [4], b"abcd")})
    own_server.larder("ckpt", "save", "run", 1, tmp_path / "m.safetensors")
    for level in ("structure", "scrub", "deep"):
        named = own_server.json("dataset", "verify", "docs", "--level", level)["objects_good"]
        assert named and own_server.json("dataset", "verify", "--level", level)["objects_good"] == named
        assert own_server.json("ckpt", "verify", "--level", level)["objects_good"] == 1


def test_versions(server, shards, tmp_path):
    server.larder("dataset", "import", "grows", shards[0])
    server.larder("dataset", "import", "grows", shards[0], shards[1], "--labels", "why=more,by=us")
    got = server.json("dataset", "ls", "grows")
    assert got["version"] == 2 and len(got["shards"]) == 2 and [v["version"] for v in got["versions"]] == [1, 2]
    assert "why=more" in got["versions"][1]["labels"]
    assert len(server.json("dataset", "ls", "grows", "--version", 1)["shards"]) == 1
    server.larder("dataset", "prune", "grows", "--keep-last", 1, "--yes", role="operator")
    assert [v["version"] for v in server.json("dataset", "ls", "grows")["versions"]] == [2]
    assert server.larder("dataset", "cat", "grows", shards[1].name, binary=True).stdout == shards[1].read_bytes()


def test_prune_speaks_of_versions(server, shards):
    for _ in range(2):
        server.larder("dataset", "import", "two", shards[0])
    plan = server.json("dataset", "prune", "two", "--keep-last", 1)
    assert plan["dataset"] == "two" and [(i["version"], i["remove"]) for i in plan["items"]] == [(1, True), (2, False)]
    head = server.larder("dataset", "prune", "two", "--keep-last", 1).stdout.splitlines()[0].split()
    assert head == ["VERSION", "STORED", "AGE", "ACTION", "WHY"]


def publish(server, folder):
    with open(server.folder / "larderd.conf", "a") as conf:
        conf.write(f"\n[publish texts]\npath = {folder}\ntenant = dev\n")
    server.stop()
    server.start()


def test_published_shards_that_are_damaged(own_server, tmp_path):
    """Each is listed and named, nothing is fed as if it were whole; links to nothing are no shards."""
    folder = tmp_path / "texts"
    folder.mkdir()
    make_tar(folder / "a.tar", [("k", {"txt": b"x" * 2000})])
    whole = (folder / "a.tar").read_bytes()
    (folder / "gone").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    publish(own_server, folder)
    assert [s["name"] for s in own_server.json("dataset", "ls", "texts")["shards"]] == ["a.tar"]
    (folder / "cut.tar").write_bytes(whole[:1000])
    done = own_server.larder("dataset", "ls", "texts", "--json", status=CORRUPT)
    assert "cut.tar" in done.stderr and "offset 1000" in done.stderr
    listed = json.loads(done.stdout)
    assert [(s["name"], s["samples"]) for s in listed["shards"]] == [("a.tar", 1), ("cut.tar", None)]
    assert "cut.tar" in own_server.larder("dataset", "ls", "texts", status=CORRUPT).stdout
    assert "cut.tar" in own_server.larder("feed", "order", "texts", status=CORRUPT).stderr
    assert own_server.larder("dataset", "cat", "texts", "cut.tar", binary=True).stdout == whole[:1000]
    folder.rename(tmp_path / "away")
    own_server.larder("dataset", "import", "other", tmp_path / "away" / "a.tar")
    done = own_server.larder("dataset", "ls", status=OTHER)
    assert "other" in done.stdout and str(folder) in done.stderr
    assert str(folder) in own_server.larder("dataset", "ls", "texts", status=OTHER).stderr


def test_published(own_server, shards, tmp_path):
    with open(own_server.folder / "larderd.conf", "a") as conf:
        conf.write(f"\n[publish texts]\npath = {shards[0].parent}\ntenant = dev\n")
    own_server.stop()
    own_server.start()
    assert [(d["name"], d["published"]) for d in own_server.json("dataset", "ls")] == [("texts", True)]
    assert own_server.json("feed", "order", "texts", "--count", 1)["samples"] > 0
    for words in (("verify", "texts"), ("prune", "texts", "--keep-last", 1), ("destroy", "texts", "--yes")):
        assert "publishes" in own_server.larder("dataset", *words, status=MISSING).stderr
    done = own_server.larder("feed", "order", "absent", status=MISSING)
    assert "larder dataset ls" in done.stderr and "publishes" not in done.stderr
    assert shards[0].exists()
    # What was imported comes first, as larderd.conf(5) says.
    own_server.larder("dataset", "import", "texts", shards[0])
    assert own_server.json("dataset", "ls", "texts")["version"] == 1


def test_order_beyond_the_end_says_so(server, imported):
    done = server.larder("feed", "order", "docs", "--from", 10000)
    assert "has positions 0 to" in done.stderr


def test_other_formats(server, tmp_path):
    records = tmp_path / "tokens.bin"
    records.write_bytes(random.Random(5).randbytes(40 * 128))
    server.larder("dataset", "import", "records", records, "--format", "records", "--record-bytes", 128)
    assert server.json("dataset", "ls", "records")["samples"] == 40
    server.larder("dataset", "import", "whole", records, "--format", "whole")
    assert server.json("dataset", "ls", "whole")["samples"] == 1
    done = server.larder("dataset", "import", "odd", records, "--format", "records", "--record-bytes", 1000, status=CORRUPT)
    assert "tokens.bin" in done.stderr
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"f{form}.tar"
        make_tar(path, [("k" * 150 + str(i), {"txt": b"x" * i}) for i in range(5)], form)
        server.larder("dataset", "import", f"form{form}", path)
        assert server.json("dataset", "ls", f"form{form}")["samples"] == 5
    empty = tmp_path / "empty.tar"
    make_tar(empty, [])
    server.larder("dataset", "import", "empty", empty, "--format", "tar")
    assert server.json("dataset", "ls", "empty")["samples"] == 0


@pytest.mark.parametrize("cut", ["inside a header", "inside data", "at a header", "nothing"])
def test_cut_tar(server, tmp_path, cut):
    path = tmp_path / "cut.tar"
    make_tar(path, [("a", {"txt": b"x" * 3000}), ("b", {"txt": b"y" * 3000})])
    keep = {"inside a header": 512 + 3072 + 100, "inside data": 512 + 3072 + 512 + 1000, "at a header": 512 + 3072,
            "nothing": 0}[cut]
    os.truncate(path, keep)
    done = server.larder("dataset", "import", "cut", path, "--format", "tar", status=CORRUPT)
    assert "cut.tar" in done.stderr
    server.larder("dataset", "ls", "cut", status=MISSING)


@pytest.mark.parametrize("members", [["a.txt", "b.txt", "a.cls"], ["a.txt", "a.txt"]])
def test_members_that_contradict(server, tmp_path, members):
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w") as t:
        for name in members:
            t.addfile(tarfile.TarInfo(name))
    done = server.larder("dataset", "import", "odd", path, status=CORRUPT)
    assert f'"{members[-1]}" at offset {512 * (len(members) - 1)}' in done.stderr


def test_a_shard_border_ends_a_sample(server, tmp_path):
    """D8: members of one key in two shards are two samples, each of what its shard has."""
    for name, field in (("one.tar", "txt"), ("two.tar", "cls")):
        make_tar(tmp_path / name, [("a", {field: b"x"}), ("b" if field == "cls" else "a0", {"txt": b"y"})])
    server.larder("dataset", "import", "border", tmp_path / "one.tar", tmp_path / "two.tar")
    got = server.json("dataset", "ls", "border")
    assert [(s["name"], s["samples"]) for s in got["shards"]] == [("one.tar", 2), ("two.tar", 2)] and got["samples"] == 4


def test_compressed_archives(server, tmp_path):
    """They are not taken for one opaque sample, unless that is asked for."""
    path = tmp_path / "c.tar.gz"
    with tarfile.open(path, "w:gz") as t:
        t.addfile(tarfile.TarInfo("a.txt"))
    for how in ("auto", "tar"):
        done = server.larder("dataset", "import", "packed", path, "--format", how, status=OTHER)
        assert "c.tar.gz" in done.stderr and "compressed" in done.stderr and "unpack" in done.stderr
    server.larder("dataset", "import", "packed", path, "--format", "whole")
    assert server.larder("dataset", "cat", "packed", "c.tar.gz", binary=True).stdout == path.read_bytes()


def test_refused(server, shards, tmp_path):
    server.larder("dataset", "import", "x", tmp_path / "absent.tar", status=MISSING)
    server.larder("dataset", "import", "x", shards[0], role="reader", status=DENIED)
    server.larder("dataset", "import", "odd\nname", shards[0], status=USAGE)
    server.larder("dataset", "ls", "x", status=MISSING)


def test_order(server, imported):
    """Every sample once an epoch; another epoch or seed gives another order; the same asks give the same."""
    def order(*more):
        got = server.json("feed", "order", "docs", "--count", 100, *more)
        assert got["samples"] == 33 and [p["position"] for p in got["order"]] == list(range(33))
        return [(p["name"], p["sample"]) for p in got["order"]]
    everything = sorted((p.name, k) for i, p in enumerate(imported) for k in range(10 + i))
    first = order("--seed", 1)
    assert sorted(first) == everything and first == order("--seed", 1)
    assert sorted(order("--seed", 1, "--epoch", 1)) == everything and order("--seed", 1, "--epoch", 1) != first
    assert order("--seed", 2) != first
    assert order("--sequential") == everything
    part = server.json("feed", "order", "docs", "--seed", 1, "--from", 30, "--count", 2)["order"]
    assert [(p["name"], p["sample"]) for p in part] == first[30:32]


def test_order_of_a_mix(server, imported):
    """Datasets by weight, each in its own order; shards chosen by name and slice; what is asked wrongly is told."""
    def order(*more, count=1000):
        return server.json("feed", "order", *more, "--count", count)
    server.larder("dataset", "import", "other", imported[0])
    got = order("docs", "other", "--weights", "3,1", count=40)
    assert got["samples"] == 33 + 10
    assert [(m["dataset"], m["version"], m["weight"]) for m in got["mix"]] == [("docs", 1, 3), ("other", 1, 1)]
    assert abs(sum(p["dataset"] == "docs" for p in got["order"]) - 30) <= 1
    names = [p.name for p in imported]
    assert order("docs", "--shards", "!" + names[0])["samples"] == 33 - 10
    only = order("docs", "--shards", names[1])
    assert {p["name"] for p in only["order"]} == {names[1]} and only["samples"] == 11
    parts = [order("docs", "--slice", f"{i}/2")["order"] for i in range(2)]
    assert sorted((p["name"], p["sample"]) for part in parts for p in part) == sorted(
        (p["name"], p["sample"]) for p in order("docs")["order"])
    for wrong in (["--slice", "2/2"], ["--slice", "x"], ["--weights", "0"], ["--weights", "1,2,3"], ["--shards", "["]):
        server.larder("feed", "order", "docs", *wrong, status=USAGE)
    table = server.larder("feed", "order", "docs", "docs", "--count", 4).stdout.splitlines()
    assert "DATASET" in table[0] and len(table) == 5


def test_progress_on_a_terminal_only(server, tmp_path):
    """Long work draws a line on a terminal, and says nothing in a pipe."""
    import pty
    import subprocess
    from conftest import LARDER
    path = tmp_path / "big.bin"
    path.write_bytes(random.Random(8).randbytes(20 << 20))
    env = dict(os.environ, LARDER_CREDENTIALS=str(server.credentials()))
    words = [str(LARDER), "dataset", "import", "progress", str(path), "--format", "whole"]
    try:
        master, slave = pty.openpty()
    except OSError as error:
        pytest.skip(f"needs a pseudo-terminal: {error}")
    process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    drawn = b""
    try:
        while piece := os.read(master, 65536):
            drawn += piece
    except OSError:
        pass  # the other end is closed
    os.close(master)
    assert process.wait(timeout=60) == OK
    assert b"\rimported" in drawn and b"20.0 MiB" in drawn and drawn.endswith(b"\r\x1b[K"), drawn[-200:]
    assert process.stdout.read().startswith(b"imported progress, version 1")
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == OK and done.stderr == b""


def test_two_files_of_one_name(server, tmp_path):
    paths = [tmp_path / d / "same.tar" for d in "ab"]
    for i, path in enumerate(paths):
        path.parent.mkdir()
        make_tar(path, [(f"k{i}", {"txt": b"x"})])
    done = server.larder("dataset", "import", "twice", *paths, status=USAGE)
    assert "same.tar" in done.stderr
