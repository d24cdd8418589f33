# SPDX-License-Identifier: Apache-2.0
"""MDS datasets and Megatron token files, written here from what those formats say of themselves: imported and
published, they give the same shards, samples and bytes."""
import hashlib
import itertools
import json
import random
import shutil
import signal
import struct
import subprocess
import time

import pytest
from conftest import BOUND_S, CORRUPT, MISSING, OK, OTHER, ROOT, USAGE

COLUMNS = [("id", "int64", 8), ("text", "str", None), ("weight", "float16", 2), ("wide", "ndarray:uint8:3", 3)]


def mds_shard(rows):
    """rows: a list of lists of bytes, one for each column."""
    bodies = [b"".join(struct.pack("<I", len(f)) for f, (_, _, n) in zip(row, COLUMNS) if n is None) + b"".join(row)
              for row in rows]
    config = json.dumps({"column_names": [c[0] for c in COLUMNS], "format": "mds"}, sort_keys=True).encode()
    first = 4 + 4 * (len(rows) + 1) + len(config)
    offsets = list(itertools.accumulate(map(len, bodies), initial=first))
    return struct.pack(f"<I{len(offsets)}I", len(rows), *offsets) + config + b"".join(bodies)


def zstd(raw):
    return subprocess.run(["zstd", "-q", "-c"], input=raw, stdout=subprocess.PIPE, check=True).stdout


def write_mds(folder, packed=False, shards=3, text_bytes=300):
    r, entries, raws = random.Random(11), [], []
    for i in range(shards):
        rows = [[struct.pack("<q", 1000 * i + k), r.randbytes(r.randrange(text_bytes)), b"\0\x3c", b"abc"] for k in range(20 + i)]
        raw = mds_shard(rows)
        name = f"shard.{i:05}.mds"
        entry = {"column_names": [c[0] for c in COLUMNS], "column_encodings": [c[1] for c in COLUMNS],
                 "column_sizes": [c[2] for c in COLUMNS], "compression": None, "format": "mds", "hashes": ["sha1"],
                 "raw_data": {"basename": name, "bytes": len(raw), "hashes": {"sha1": hashlib.sha1(raw).hexdigest()}},
                 "samples": len(rows), "size_limit": 1 << 26, "version": 2, "zip_data": None}
        if packed:
            small = zstd(raw)
            entry["compression"] = "zstd:3"
            entry["zip_data"] = {"basename": name + ".zstd", "bytes": len(small),
                                 "hashes": {"md5": hashlib.md5(small).hexdigest()}}
            (folder / (name + ".zstd")).write_bytes(small)
        else:
            (folder / name).write_bytes(raw)
        entries.append(entry)
        raws.append(raw)
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}, sort_keys=True))
    return raws


def write_tokens(folder, name, documents, code=8, letter="H"):
    """documents: lists of sequences, which are lists of tokens."""
    sequences = [s for d in documents for s in d]
    width = struct.calcsize(letter)
    lengths = list(map(len, sequences))
    starts = [width * n for n in itertools.accumulate(lengths, initial=0)][:-1]
    borders = list(itertools.accumulate(map(len, documents), initial=0))
    (folder / f"{name}.bin").write_bytes(b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences))
    (folder / f"{name}.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(borders)) +
        struct.pack(f"<{len(lengths)}i{len(starts)}q{len(borders)}q", *lengths, *starts, *borders))


def shards_of(server, name):
    return [(s["name"], s["samples"], s["bytes"]) for s in server.json("dataset", "ls", name)["shards"]]


def publish(server, **sections):
    with open(server.folder / "larderd.conf", "a") as conf:
        for name, (folder, more) in sections.items():
            conf.write(f"\n[publish {name}]\npath = {folder}\ntenant = dev\n{more}\n")
    server.stop()
    server.start()


def await_files(folder, count):
    until = time.monotonic() + BOUND_S
    while len(list(folder.iterdir())) != count:
        assert time.monotonic() < until
        time.sleep(0.02)


def assert_bytes(server, name, shard, raw):
    assert server.larder("dataset", "cat", name, shard, binary=True).stdout == raw


def order(server, name):
    return [(p["name"], p["sample"]) for p in server.json("feed", "order", name, "--seed", 4, "--count", 1000)["order"]]


def test_mds(own_server, tmp_path):
    raws = write_mds(tmp_path)
    expected = [(f"shard.{i:05}.mds", 20 + i, len(raw)) for i, raw in enumerate(raws)]
    assert own_server.json("dataset", "import", "folder", tmp_path) == {"dataset": "folder", "version": 1, "shards": 3}
    own_server.larder("dataset", "import", "index", tmp_path / "index.json", "--format", "mds")
    publish(own_server, inplace=(tmp_path, "format = mds"))
    for name in ("folder", "index", "inplace"):
        assert shards_of(own_server, name) == expected
        for (shard, _, _), raw in zip(expected, raws):
            assert_bytes(own_server, name, shard, raw)
    # Which sample comes when depends on counts and seed alone, not on how the shards are kept.
    assert order(own_server, "folder") == order(own_server, "inplace")
    assert len(order(own_server, "folder")) == 63
    own_server.larder("dataset", "import", "folder", tmp_path / "shard.00000.mds", status=USAGE)
    own_server.larder("dataset", "import", "folder", tmp_path, "--format", "tar", status=USAGE)


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs zstd, to pack shards with")
def test_packed_mds(own_server, tmp_path):
    raws = write_mds(tmp_path, packed=True)
    own_server.larder("dataset", "import", "packed", tmp_path)
    assert shards_of(own_server, "packed") == [(f"shard.{i:05}.mds", 20 + i, len(raw)) for i, raw in enumerate(raws)]
    for i, raw in enumerate(raws):
        assert_bytes(own_server, "packed", f"shard.{i:05}.mds", raw)
    # In place the same, unpacked once by the server; also with some of them raw.
    publish(own_server, inplace=(tmp_path, "format = mds"))
    kept = own_server.folder / "store" / "unpacked-shards"
    for unpacked in (3, 2):
        assert shards_of(own_server, "inplace") == shards_of(own_server, "packed")
        assert order(own_server, "inplace") == order(own_server, "packed")
        for i, raw in enumerate(raws):
            assert_bytes(own_server, "inplace", f"shard.{i:05}.mds", raw)
        files = list(kept.iterdir())
        assert sorted(f.stat().st_size for f in files) == sorted(map(len, raws[3 - unpacked:]))
        # The next server finds them.
        own_server.stop()
        own_server.start()
        assert_bytes(own_server, "inplace", "shard.00002.mds", raws[2])
        assert {(f, f.stat().st_ino) for f in files} == {(f, f.stat().st_ino) for f in kept.iterdir()}
        (tmp_path / "shard.00000.mds").write_bytes(raws[0])
        own_server.larder("dataset", "ls", "inplace")
        await_files(kept, 2)  # what is raw now needs none
    # A folder that is published no more needs none at all.
    conf = own_server.folder / "larderd.conf"
    conf.write_text(conf.read_text().split("\n[publish inplace]")[0])
    own_server.process.send_signal(signal.SIGHUP)
    await_files(kept, 0)


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs zstd, to pack shards with")
def test_damaged_packed_mds(own_server, tmp_path):
    raws = write_mds(tmp_path, packed=True)
    path = tmp_path / "shard.00001.mds.zstd"
    small = path.read_bytes()
    path.write_bytes(small[:-9] + bytes([small[-9] ^ 1]) + small[-8:])
    publish(own_server, inplace=(tmp_path, "format = mds"))
    done = own_server.larder("dataset", "cat", "inplace", "shard.00001.mds", status=CORRUPT)
    assert "shard.00001.mds.zstd" in done.stderr and "put the right file there" in done.stderr
    assert_bytes(own_server, "inplace", "shard.00000.mds", raws[0])
    assert_bytes(own_server, "inplace", "shard.00002.mds", raws[2])
    path.write_bytes(small)
    assert_bytes(own_server, "inplace", "shard.00001.mds", raws[1])


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs zstd, to pack shards with")
def test_room_for_unpacked_mds(own_server, tmp_path):
    """Who goes through more than may be kept gets all bytes, and the room is kept."""
    conf = own_server.folder / "larderd.conf"
    conf.write_text(conf.read_text().replace("[server]", "[server]\nunpacked_shards = 1M"))
    raws = write_mds(tmp_path, packed=True, shards=8, text_bytes=20000)
    publish(own_server, inplace=(tmp_path, "format = mds"))
    assert sum(map(len, raws)) > 1 << 20
    kept = own_server.folder / "store" / "unpacked-shards"
    for _ in range(2):
        for i, raw in enumerate(raws):
            assert_bytes(own_server, "inplace", f"shard.{i:05}.mds", raw)
            assert sum(f.stat().st_size for f in kept.iterdir()) <= 1 << 20


def test_damaged_mds(server, tmp_path):
    raws = write_mds(tmp_path)
    path = tmp_path / "shard.00001.mds"
    path.write_bytes(raws[1][:-1] + bytes([raws[1][-1] ^ 1]))
    done = server.larder("dataset", "import", "damaged", tmp_path, status=CORRUPT)
    assert "shard.00001.mds" in done.stderr and hashlib.sha1(raws[1]).hexdigest() in done.stderr
    server.larder("dataset", "ls", "damaged", status=MISSING)
    # A checksum that nobody here can compute is told, and no reason to refuse the shard.
    index = json.loads((tmp_path / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {"whirl": "00"}
    (tmp_path / "index.json").write_text(json.dumps(index))
    done = server.larder("dataset", "import", "damaged", tmp_path)
    assert done.stderr.count("whirl") == 1 and done.stderr.startswith("larder: shard.00000.mds: the checksum whirl")


DOCUMENTS = [[[1, 2, 3], [4]], [], [list(range(5, 30))]]


def test_tokens(own_server, tmp_path):
    write_tokens(tmp_path, "a_text_document", DOCUMENTS)
    write_tokens(tmp_path, "b_text_document", DOCUMENTS[:1])
    publish(own_server, documents=(tmp_path, "format = tokens"), windows=(tmp_path, "format = tokens\nwindow = 4+1"))
    own_server.larder("dataset", "import", "imported", tmp_path)
    own_server.larder("dataset", "import", "cut", tmp_path, "--format", "tokens", "--window", "4+1")
    for name in ("documents", "imported"):
        assert shards_of(own_server, name) == [("a_text_document.bin", 3, 58), ("b_text_document.bin", 1, 8)]
    for name in ("windows", "cut"):
        assert shards_of(own_server, name) == [("a_text_document.bin", 7, 58), ("b_text_document.bin", 0, 8)]
    for name in ("documents", "imported", "windows", "cut"):
        assert_bytes(own_server, name, "a_text_document.bin", (tmp_path / "a_text_document.bin").read_bytes())
    assert own_server.json("dataset", "import", "one", tmp_path / "b_text_document.idx")["shards"] == 1
    for words in (("--window", "none"), ("--window", "4+5"), ("--window", "0"), ("--window", "4", "--format", "tar")):
        own_server.larder("dataset", "import", "imported", tmp_path, *words, status=USAGE)


@pytest.mark.parametrize("code, letter", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")])
def test_every_dtype(server, tmp_path, code, letter):
    write_tokens(tmp_path, "t", DOCUMENTS, code, letter)
    server.larder("dataset", "import", f"dtype{code}", tmp_path / "t.bin")
    assert shards_of(server, f"dtype{code}") == [("t.bin", 3, 29 * struct.calcsize(letter))]


def test_wrong_pairs(server, tmp_path):
    """D16: an .idx past the end of its .bin, of another dtype or version, or without a .bin."""
    write_tokens(tmp_path, "t", DOCUMENTS)
    idx, raw = (tmp_path / "t.idx").read_bytes(), (tmp_path / "t.bin").read_bytes()
    (tmp_path / "t.bin").write_bytes(raw[:-2])
    assert "58" in server.larder("dataset", "import", "wrong", tmp_path, status=CORRUPT).stderr
    (tmp_path / "t.bin").write_bytes(raw)
    for at, value, status, word in ((9, 2, OTHER, "version 2"), (17, 9, CORRUPT, "dtype code 9"), (17, 4, CORRUPT, "byte 6")):
        (tmp_path / "t.idx").write_bytes(idx[:at] + bytes([value]) + idx[at + 1:])
        done = server.larder("dataset", "import", "wrong", tmp_path, status=status)
        assert word in done.stderr and "t.idx" in done.stderr
    (tmp_path / "t.idx").write_bytes(idx)
    (tmp_path / "t.bin").unlink()
    assert "t.bin" in server.larder("dataset", "import", "wrong", tmp_path, status=MISSING).stderr
    server.larder("dataset", "ls", "wrong", status=MISSING)


def test_files_of_the_library(server):
    for form in ("raw", "zstd"):
        done = server.larder("dataset", "import", f"library-{form}", ROOT / "tests/golden/mosaicml" / form)
        assert done.returncode == OK and done.stderr == ""
        assert [s[:2] for s in shards_of(server, f"library-{form}")] == [("shard.00000.mds", 15), ("shard.00001.mds", 5)]
