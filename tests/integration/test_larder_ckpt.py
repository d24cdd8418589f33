# SPDX-License-Identifier: Apache-2.0
"""larder ckpt: save and restore of safetensors files, lists, verify, marks, prune, and damage."""
import filecmp
import json
import os
import random
import struct
import subprocess
import time

import pytest
from conftest import (CONFLICT, CORRUPT, DAMAGE, DENIED, KEY, LARDER, MISSING, OK, USAGE, WIDTHS, edited_credentials, read_safetensors,
                      write_safetensors)


def tensors_of(seed, scale=1):
    """Every dtype, scalars, empty ones, odd names, one larger than a chunk."""
    r = random.Random(seed)
    made = {}
    for dtype, width in WIDTHS.items():
        shape = [3, 5 * scale]
        made[f"layer/{dtype}"] = (dtype, shape, r.randbytes(15 * scale * width))
    made["scalar"] = ("F32", [], struct.pack("<f", 1.5))
    made["empty"] = ("BF16", [2, 0], b"")
    made["../ü ~"] = ("U8", [4], b"abcd")
    made["large"] = ("F32", [1500, 1000], bytes(1500 * 1000 * 4 // 2) + r.randbytes(1500 * 1000 * 4 // 2))
    return made


@pytest.fixture(scope="module")
def saved(server, tmp_path_factory):
    """A run with three checkpoints, of steps 10, 20, 30."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20, 30):
        write_safetensors(folder / f"{step}.safetensors", tensors_of(step), {"format": "pt", "step": str(step)})
        server.larder("ckpt", "save", "run", step, folder / f"{step}.safetensors", role="writer")
    return folder


def test_save_and_restore(server, saved, tmp_path):
    for step in (10, 30):
        done = server.json("ckpt", "restore", "run", step, tmp_path / f"{step}.safetensors", role="reader")
        assert done["step"] == step and done["tensors"] == len(tensors_of(step))
        tensors, metadata = read_safetensors(tmp_path / f"{step}.safetensors")
        assert tensors == tensors_of(step)
        assert list(tensors) == list(tensors_of(step)), "the order of the data is kept"
        assert metadata == {"format": "pt", "step": str(step)}
    server.larder("ckpt", "restore", "run", tmp_path / "latest.safetensors")
    assert (tmp_path / "latest.safetensors").read_bytes() == (tmp_path / "30.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10.safetensors", "30.safetensors", "latest.safetensors"]


def test_restore_does_not_overwrite(server, saved, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    done = server.larder("ckpt", "restore", "run", out, status=CONFLICT)
    assert out.read_text() == "mine" and "--force" in done.stderr
    server.larder("ckpt", "restore", "run", out, "--force")
    assert read_safetensors(out)[0] == tensors_of(30)


def test_restore_part(server, saved, tmp_path):
    server.larder("ckpt", "restore", "run", tmp_path / "o.safetensors", "--prefix", "layer/F")
    got, _ = read_safetensors(tmp_path / "o.safetensors")
    assert got == {k: v for k, v in tensors_of(30).items() if k.startswith("layer/F")}
    done = server.larder("ckpt", "restore", "run", tmp_path / "p.safetensors", "--prefix", "nope", status=MISSING)
    assert "nope" in done.stderr and not (tmp_path / "p.safetensors").exists()


def test_sharded_files_with_index(server, tmp_path):
    parts = {"model-1-of-2.safetensors": {"a": ("F32", [2], struct.pack("<2f", 1, 2)), "b": ("U8", [3], b"xyz")},
             "model-2-of-2.safetensors": {"c": ("BF16", [1, 2], b"\x80\x3f\x00\x40")}}
    for name, tensors in parts.items():
        write_safetensors(tmp_path / name, tensors, {"format": "pt"})
    index = {"metadata": {"total_size": 15}, "weight_map": {t: name for name, ts in parts.items() for t in ts}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    server.larder("ckpt", "save", "sharded", 1, tmp_path / "model.safetensors.index.json")

    (tmp_path / "out").mkdir()
    done = server.json("ckpt", "restore", "sharded", tmp_path / "out/model.safetensors.index.json")
    assert len(done["files"]) == 2
    for name, tensors in parts.items():
        assert read_safetensors(tmp_path / "out" / name) == (tensors, {"format": "pt"})
    assert json.loads((tmp_path / "out/model.safetensors.index.json").read_text()) == index
    server.larder("ckpt", "restore", "sharded", tmp_path / "one.safetensors")
    assert read_safetensors(tmp_path / "one.safetensors")[0] == {t: v for ts in parts.values() for t, v in ts.items()}

    index["weight_map"]["c"] = "../../etc/passwd"
    (tmp_path / "bad.safetensors.index.json").write_text(json.dumps(index))
    done = server.larder("ckpt", "save", "sharded", 2, tmp_path / "bad.safetensors.index.json", status=CORRUPT)
    assert '"c"' in done.stderr
    index["weight_map"]["c"] = "model-1-of-2.safetensors"
    (tmp_path / "bad.safetensors.index.json").write_text(json.dumps(index))
    server.larder("ckpt", "save", "sharded", 2, tmp_path / "bad.safetensors.index.json", status=CORRUPT)
    assert [c["step"] for c in server.json("ckpt", "ls", "sharded") if c["state"] == "good"] == [1]


def header(text):
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(raw)) + raw


@pytest.mark.parametrize("name, content", [
    ("empty", b""), ("short", b"\x01\x02"), ("endless header", struct.pack("<Q", 1 << 62) + b"{}"),
    ("cut header", struct.pack("<Q", 100) + b"{}"), ("not JSON", header(b"{nope}")),
    ("beyond the end", header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + b"abcd"),
    ("hole", header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}) + b"ab"),
    ("overlap", header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                        "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}) + b"abc"),
    ("unknown dtype", header({"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}}) + b"a"),
    ("shape and bytes differ", header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"abcd"),
    ("twice", header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],'
                     b'"data_offsets":[1,2]}}') + b"ab"),
    ("data left over", header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}) + b"abc"),
])
def test_bad_safetensors(server, tmp_path, name, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    done = server.larder("ckpt", "save", "bad", 1, path, status=CORRUPT)
    assert "bad.safetensors" in done.stderr, f"{name}: the file is named"


def test_no_tensors_at_all(server, tmp_path):
    write_safetensors(tmp_path / "none.safetensors", {}, {"of": "nothing"})
    server.larder("ckpt", "save", "none", 1, tmp_path / "none.safetensors")
    server.larder("ckpt", "restore", "none", tmp_path / "back.safetensors")
    assert read_safetensors(tmp_path / "back.safetensors") == ({}, {"of": "nothing"})


@pytest.mark.parametrize("step", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_ends_of_steps(server, tmp_path, step):
    """All 64 bits, in text and in JSON, where they are digits once a reader of JSON might round them."""
    run, said = f"ends {step}", step if step < 2**63 else str(step)
    write_safetensors(tmp_path / "a.safetensors", {"t": ("U8", [1], b"x")})
    assert server.json("ckpt", "save", run, step, tmp_path / "a.safetensors")["step"] == said
    assert [c["step"] for c in server.json("ckpt", "ls", run)] == [said]
    assert server.json("ckpt", "show", run, step)["step"] == said
    assert server.json("ckpt", "prune", run, "--keep-last", 1)["items"][0]["step"] == said
    assert [r["latest_step"] for r in server.json("ckpt", "ls") if r["name"] == run] == [said]
    assert str(step) in server.larder("ckpt", "ls", run).stdout
    server.larder("ckpt", "save", run, step + 2**64, tmp_path / "a.safetensors", status=USAGE)


def test_one_tensor_in_two_files(server, tmp_path):
    for name in "ab":
        write_safetensors(tmp_path / f"{name}.safetensors", {"t": ("U8", [1], b"x")})
    done = server.larder("ckpt", "save", "bad", 1, tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=CORRUPT)
    assert '"t"' in done.stderr


def test_missing_things(server, saved, tmp_path):
    server.larder("ckpt", "show", "no such run", status=MISSING)
    server.larder("ckpt", "ls", "no such run", status=MISSING)
    server.larder("ckpt", "show", "run", 11, status=MISSING)
    server.larder("ckpt", "pin", "run", 11, status=MISSING)
    server.larder("ckpt", "verify", "run", 11, status=MISSING)
    server.larder("ckpt", "restore", "run", 11, tmp_path / "o.safetensors", status=MISSING)
    server.larder("ckpt", "save", "run", 40, tmp_path / "absent.safetensors", status=MISSING)
    assert list(tmp_path.iterdir()) == []


def test_ls(server, saved):
    runs = {r["name"]: r for r in server.json("ckpt", "ls")}
    assert runs["run"]["commits"] == 3 and runs["run"]["latest_step"] == 30 and runs["run"]["key_epoch"] == 1
    listed = server.json("ckpt", "ls", "run")
    assert [(c["step"], c["state"], c["world"], c["parts"]) for c in listed] == [
        (10, "good", 1, 1), (20, "good", 1, 1), (30, "good", 1, 1)]
    assert sorted(c["sequence"] for c in listed) == [c["sequence"] for c in listed]
    assert all(0 < c["stored_bytes"] and c["plain_bytes"] > 6000000 for c in listed)
    table = server.larder("ckpt", "ls", "run").stdout.splitlines()
    assert table[0].split()[:3] == ["STEP", "SEQ", "STATE"] and len(table) == 4
    assert "5.7 MiB" in table[1] and "ago" in table[1]


def test_show(server, saved):
    got = server.json("ckpt", "show", "run", 20)
    want = tensors_of(20)
    assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in got["tensors"]} == {
        k: (d, s, len(raw)) for k, (d, s, raw) in want.items()}
    assert got["labels"]["source"] == "safetensors" and got["step"] == 20
    assert server.json("ckpt", "show", "run")["step"] == 30
    assert "large" in server.larder("ckpt", "show", "run").stdout


@pytest.mark.parametrize("level", ["structure", "scrub", "deep"])
def test_verify_good(server, saved, level):
    got = server.json("ckpt", "verify", "run", "--level", level)
    assert got["damaged"] == 0 and got["findings"] == [] and got["objects_good"] >= 3
    got = server.json("ckpt", "verify", "run", 20, "--level", level)
    assert got["damaged"] == 0 and got["objects_good"] >= 1
    assert "0 damaged" in server.larder("ckpt", "verify", "--level", level).stdout


def test_roles(server, saved, tmp_path):
    write_safetensors(tmp_path / "t.safetensors", {"t": ("U8", [1], b"x")})
    server.larder("ckpt", "save", "roles", 1, tmp_path / "t.safetensors", role="reader", status=DENIED)
    server.larder("ckpt", "prune", "run", "--keep-last", 1, "--yes", role="writer", status=DENIED)
    server.larder("ckpt", "pin", "run", 10, role="reader", status=DENIED)
    assert len(server.json("ckpt", "ls", "run")) == 3


def test_wrong_key(server, saved, tmp_path):
    wrong = edited_credentials(server.credentials(), tmp_path / "wrong.json", keks=[{"epoch": 1, "key": "5a" * 32}])
    done = server.larder("ckpt", "show", "run", credentials=wrong, status=KEY)
    assert "key" in done.stderr
    other = edited_credentials(server.credentials(), tmp_path / "other.json", keks=[{"epoch": 7, "key": "5a" * 32}])
    server.larder("ckpt", "restore", "run", tmp_path / "o.safetensors", credentials=other, status=KEY)
    assert server.json("ckpt", "ls", "run", credentials=wrong), "lists need no key"
    assert server.json("ckpt", "verify", "run", "--level", "scrub", credentials=wrong)["damaged"] == 0


def test_pin_mark_and_prune(server, tmp_path):
    for step in range(1, 7):
        write_safetensors(tmp_path / "t.safetensors", {"t": ("U32", [1], struct.pack("<I", step))})
        server.larder("ckpt", "save", "prune", step * 10, tmp_path / "t.safetensors")
    assert "pinned" in server.larder("ckpt", "pin", "prune", 10, "--reason", "paper", role="operator").stdout
    server.larder("ckpt", "mark", "prune", 60, "bad", "--reason", "loss diverged", role="operator")
    listed = {c["step"]: c for c in server.json("ckpt", "ls", "prune")}
    assert listed[10]["pinned"] and listed[60]["state"] == "bad"
    assert (listed[10]["reason"], listed[20]["reason"], listed[60]["reason"]) == ("paper", "", "loss diverged")
    assert server.json("ckpt", "show", "prune")["step"] == 50, "latest passes over a bad one"

    words = ["ckpt", "prune", "prune", "--keep-last", 2, "--keep-every", 30]
    plan = server.json(*words, role="operator")
    keep = {i["step"] for i in plan["items"] if not i["remove"]}
    assert plan["executed"] is False and plan["removed"] == 0 and len(plan["plan"]) == 64
    assert {10, 30, 50} <= keep and 20 not in keep and all(i["reason"] for i in plan["items"])
    assert len(server.json("ckpt", "ls", "prune")) == 6, "a plan changes nothing"
    text = server.larder(*words, role="operator").stdout
    assert "pinned" in text and plan["plan"] in text and "--yes" in text

    # The plan that was seen is not the one that would be carried out any more.
    server.larder("ckpt", "pin", "prune", 20, role="operator")
    server.larder(*words, "--yes", "--plan", plan["plan"], role="operator", status=CONFLICT)
    assert len(server.json("ckpt", "ls", "prune")) == 6
    server.larder("ckpt", "pin", "prune", 20, "--reason", "later", role="operator")  # told twice: the first stays
    server.larder("ckpt", "unpin", "prune", 20, role="operator")
    assert {c["step"]: c["reason"] for c in server.json("ckpt", "ls", "prune")}[20] == ""
    younger = server.json("ckpt", "prune", "prune", "--keep-within", "36h")["items"][2]["reason"]
    assert younger == "younger than 36 hours"
    done = server.json(*words, "--yes", "--plan", plan["plan"], role="operator")
    assert done["executed"] and done["removed"] == done["to_remove"] == plan["to_remove"]
    left = {c["step"] for c in server.json("ckpt", "ls", "prune") if c["state"] in ("good", "bad")}
    assert left == keep
    assert server.json("ckpt", "verify", "prune")["damaged"] == 0
    server.larder(*words, "--yes", "--plan", "12", role="operator", status=USAGE)


def test_prune_keeps_the_last_good_one(server, tmp_path):
    write_safetensors(tmp_path / "t.safetensors", {"t": ("U8", [1], b"x")})
    for step in (1, 2):
        server.larder("ckpt", "save", "last", step, tmp_path / "t.safetensors")
    server.larder("ckpt", "mark", "last", 2, "bad")
    server.larder("ckpt", "prune", "last", "--keep-last", 1, "--yes")
    assert 1 in [c["step"] for c in server.json("ckpt", "ls", "last")]
    assert server.json("ckpt", "show", "last")["step"] == 1


def test_destroy(server, tmp_path):
    write_safetensors(tmp_path / "t.safetensors", {"t": ("U8", [1], b"x")})
    server.larder("ckpt", "save", "gone", 1, tmp_path / "t.safetensors")
    server.larder("ckpt", "destroy", "gone", status=USAGE)
    server.larder("ckpt", "destroy", "gone", "--yes")
    server.larder("ckpt", "show", "gone", status=MISSING)


def damage_largest(folder, size):
    """Flips bytes in the middle of a chunk of the stored segment that is larger than `size`."""
    files = [p for p in (folder / "store").rglob("*") if p.is_file() and p.stat().st_size > size]
    assert len(files) == 1, files
    with open(files[0], "r+b") as f:
        f.seek(4096 + 100)
        was = f.read(8)
        f.seek(4096 + 100)
        f.write(bytes(b ^ 0x55 for b in was))
        os.fsync(f.fileno())
    return files[0]


@pytest.fixture
def damaged_record(own_server, tmp_path):
    """Of a store with steps 1 and 2 of "run" and one of "other": flips a byte of a record of "run" while the server is
    down; at the end puts it back, after which all is well again."""
    content, undo = {"t": ("U8", [10], b"0123456789")}, []
    write_safetensors(tmp_path / "a.safetensors", content)

    def damage(pattern):
        for step in (1, 2):
            own_server.larder("ckpt", "save", "run", step, tmp_path / "a.safetensors")
        victim, = (own_server.folder / "store/objects/t/dev").glob(pattern)
        own_server.larder("ckpt", "save", "other", 1, tmp_path / "a.safetensors")
        own_server.stop()
        was = victim.read_bytes()
        undo.append((victim, was))
        victim.write_bytes(was[:40] + bytes([was[40] ^ 1]) + was[41:])
        own_server.start()
        own_server.larder("ckpt", "restore", "other", tmp_path / "other.safetensors")
        return victim.name
    yield damage
    own_server.stop()
    for victim, was in undo:
        victim.write_bytes(was)
    own_server.start()
    assert own_server.json("ckpt", "verify", "--level", "scrub")["damaged"] == 0
    own_server.larder("ckpt", "restore", "run", 2, tmp_path / "back.safetensors")
    assert read_safetensors(tmp_path / "back.safetensors")[0] == content


def findings(server, *words):
    return json.loads(server.larder("ckpt", "verify", *words, "--json", status=DAMAGE).stdout)["findings"]


def test_a_damaged_commit_record(own_server, damaged_record, tmp_path):
    name = damaged_record("r/*/c-*2")
    for level in ("structure", "scrub", "deep"):
        found, = findings(own_server, "run", "--level", level)
        assert (found["sequence"], found["class"], found["offset"]) == (2, "corrupt", 0) and name in str(found), level
    assert name in own_server.larder("ckpt", "verify", "run", "--mark-bad", status=DAMAGE).stdout
    assert [(c["step"], c["state"]) for c in own_server.json("ckpt", "ls", "run", "--committed")] \
        == [(1, "good"), (None, "bad")]
    assert name in own_server.larder("ckpt", "ls", "run").stdout
    assert name in own_server.larder("ckpt", "restore", "run", 2, tmp_path / "o.safetensors", status=CORRUPT).stderr
    own_server.larder("ckpt", "prune", "run", "--keep-last", 1, "--yes")
    assert own_server.json("ckpt", "show", "run")["step"] == 1


def test_a_damaged_key_envelope(own_server, damaged_record, tmp_path):
    name = damaged_record("r/*/e-*")
    found, = findings(own_server, "run", "--level", "structure")
    assert found["object"].endswith(name) and found["class"] == "corrupt"
    for words in (("show", "run"), ("restore", "run", tmp_path / "o.safetensors"), ("verify", "run", "--level", "deep"),
                  ("save", "run", 3, tmp_path / "a.safetensors")):
        assert "envelope(s) of run" in own_server.larder("ckpt", *words, status=CORRUPT).stderr
    assert len(own_server.json("ckpt", "ls", "run")) == 2


@pytest.mark.parametrize("pattern", ["r/*/a-*1", "n/c-*"])
def test_another_damaged_record(own_server, damaged_record, tmp_path, pattern):
    name = damaged_record(pattern)
    assert name in [f["object"].rsplit("/")[-1] for f in findings(own_server)]
    if pattern[0] == "n":
        for words in (("show", "run"), ("ls", "run"), ("verify", "run"), ("save", "run", 3, tmp_path / "a.safetensors")):
            assert name in own_server.larder("ckpt", *words, status=CORRUPT).stderr
    else:
        own_server.larder("ckpt", "restore", "run", 1, tmp_path / "o.safetensors")


def test_damage_goes_with_its_run(own_server, tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"t": ("U8", [1], b"x")})
    own_server.larder("ckpt", "save", "run", 1, tmp_path / "a.safetensors")
    own_server.stop()
    victim, = (own_server.folder / "store/objects/t/dev").glob("r/*/c-*1")
    victim.write_bytes(b"")
    own_server.start()
    assert findings(own_server)[0]["object"].endswith(victim.name)
    own_server.larder("ckpt", "destroy", "run", "--yes")
    assert own_server.json("ckpt", "verify")["damaged"] == 0 and not victim.exists()


def test_deep_verify_reads_the_medium(own_server, tmp_path):
    """What the server has in memory from a restore a moment ago proves nothing about the disk."""
    write_safetensors(tmp_path / "b.safetensors", {"w": ("U8", [3000000], random.Random(1).randbytes(3000000))})
    own_server.larder("ckpt", "save", "run", 1, tmp_path / "b.safetensors")
    own_server.larder("ckpt", "restore", "run", tmp_path / "o.safetensors")
    damage_largest(own_server.folder, 2000000)
    own_server.larder("ckpt", "restore", "run", tmp_path / "o.safetensors", "--force")  # from memory, as it was
    deep = json.loads(own_server.larder("ckpt", "verify", "run", "--level", "deep", "--json", status=DAMAGE).stdout)
    assert deep["damaged"] == 1 and deep["findings"][0]["tensor"] == "w"


def test_damage_is_found_named_and_passed_over(own_server, tmp_path):
    small = {"t": ("U8", [10], b"0123456789")}
    big = {"w": ("U8", [3000000], random.Random(1).randbytes(3000000)), "t": ("U8", [10], b"0123456789")}
    write_safetensors(tmp_path / "s.safetensors", small)
    write_safetensors(tmp_path / "b.safetensors", big)
    own_server.larder("ckpt", "save", "run", 1, tmp_path / "s.safetensors")
    own_server.larder("ckpt", "save", "run", 2, tmp_path / "b.safetensors")
    own_server.stop()
    damage_largest(own_server.folder, 2000000)
    own_server.start()

    got = json.loads(own_server.larder("ckpt", "verify", "run", "--json", status=DAMAGE).stdout)
    assert got["damaged"] == 1 and len(got["findings"]) == 1
    found = got["findings"][0]
    assert found["step"] == 2 and found["chunk"] >= 0 and found["class"] == "corrupt" and found["text"]
    deep = json.loads(own_server.larder("ckpt", "verify", "run", "--level", "deep", "--json", status=DAMAGE).stdout)
    assert deep["damaged"] >= 1 and any(f["tensor"] == "w" for f in deep["findings"])

    done = own_server.larder("ckpt", "restore", "run", 2, tmp_path / "o.safetensors", status=DAMAGE)
    assert "w" in done.stderr and not (tmp_path / "o.safetensors").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("o.safetensors")], "no half file stays"
    own_server.larder("ckpt", "restore", "run", 1, tmp_path / "o.safetensors")
    assert read_safetensors(tmp_path / "o.safetensors")[0] == small

    own_server.larder("ckpt", "verify", "run", "--mark-bad", status=DAMAGE)
    assert own_server.json("ckpt", "show", "run")["step"] == 1, "latest passes over it"


@pytest.mark.parametrize("run", ["a/b", "../../etc", "~", "ü€𝄞", "x" * 255, "-dash", "with blank", "nine;rm -rf"])
def test_names_are_opaque(server, tmp_path, run):
    write_safetensors(tmp_path / "t.safetensors", {"t": ("U8", [1], b"x")})
    server.larder("ckpt", "save", "--", run, 1, tmp_path / "t.safetensors")
    assert run in {r["name"] for r in server.json("ckpt", "ls")}
    assert server.json("ckpt", "show", "--", run)["run"] == run
    server.larder("ckpt", "restore", "--", run, tmp_path / "o.safetensors")
    assert read_safetensors(tmp_path / "o.safetensors")[0] == {"t": ("U8", [1], b"x")}


@pytest.mark.parametrize("run", ["", "x" * 256, "new\nline", "\x1b[31mred", b"\xff\xfe"])
def test_names_that_cannot_be(server, tmp_path, run):
    write_safetensors(tmp_path / "t.safetensors", {"t": ("U8", [1], b"x")})
    done = run_raw(server, "ckpt", "save", run, "1", str(tmp_path / "t.safetensors"))
    assert done.returncode == USAGE, done.stderr
    assert b"\x1b" not in done.stderr and b"\xff" not in done.stderr, "names are shown escaped"


def run_raw(server, *words):
    return subprocess.run([str(LARDER), *words], env=dict(os.environ, LARDER_CREDENTIALS=str(server.credentials())),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)


def test_a_killed_restore_leaves_nothing(server, tmp_path):
    write_safetensors(tmp_path / "t.safetensors", {"w": ("U8", [30 << 20], random.Random(3).randbytes(30 << 20))})
    server.larder("ckpt", "save", "killed", 1, tmp_path / "t.safetensors")
    out = tmp_path / "out"
    out.mkdir()
    rng = random.Random(4)
    for _ in range(6):
        process = subprocess.Popen([str(LARDER), "ckpt", "restore", "killed", str(out / "o.safetensors")],
                                   env=dict(os.environ, LARDER_CREDENTIALS=str(server.credentials())),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.02, 0.15))
        process.kill()
        done = process.wait()
        assert [p.name for p in out.iterdir()] in ([], ["o.safetensors"])
        if (out / "o.safetensors").exists():
            assert read_safetensors(out / "o.safetensors")[0] == read_safetensors(tmp_path / "t.safetensors")[0], done
            (out / "o.safetensors").unlink()


def test_a_file_cut_while_it_is_saved(server, tmp_path):
    """The map's pages go away under the library: a sentence, not a signal."""
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"w": ("U8", [64 << 20], bytes(64 << 20))})
    for wait in (0.02, 0.04, 0.06, 0.08):
        process = subprocess.Popen([str(LARDER), "ckpt", "save", "cut", "1", str(path)],
                                   env=dict(os.environ, LARDER_CREDENTIALS=str(server.credentials())),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(wait)
        os.truncate(path, 4096)
        _, text = process.communicate(timeout=60)
        assert process.returncode in (OK, CORRUPT), (process.returncode, text)
        os.truncate(path, 0)
        write_safetensors(path, {"w": ("U8", [64 << 20], bytes(64 << 20))})


def test_restores_that_begin_one_after_the_other_read_together(own_server, tmp_path):
    """A checkpoint several times as large as the server's memory for what was read, restored by three, of which two begin
    while the first is in the middle of it. Each on its own would read all of it from disk: 3 times. Who joins the others
    where they are and reads the beginning afterwards leaves some 1.6. The tenant's bandwidth keeps them slower than this
    test."""
    plain, clients = 192 << 20, 3
    write_safetensors(tmp_path / "t.safetensors", {"w": ("U8", [plain], random.Random(7).randbytes(plain))})
    own_server.larder("ckpt", "save", "shared", 1, tmp_path / "t.safetensors")
    own_server.stop()
    config = own_server.folder / "larderd.conf"
    config.write_text(config.read_text().replace("[server]\n", "[server]\nread_cache = 48M\n", 1) +
                      "[tenant dev]\nbandwidth = 24M\n")
    own_server.start()

    def figures():
        status = own_server.json("status")["status"]
        return status["disk_read_bytes"], status["restore_read_bytes"]

    disk, sent = figures()
    restores = []
    try:
        for i in range(clients):
            until = time.monotonic() + 60
            while figures()[1] - sent < i * (60 << 20):
                assert time.monotonic() < until and restores[0].poll() is None
            restores.append(subprocess.Popen([str(LARDER), "ckpt", "restore", "shared", str(tmp_path / f"{i}.safetensors")],
                                             env=dict(os.environ, LARDER_CREDENTIALS=str(own_server.credentials())),
                                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        assert [r.wait(timeout=120) for r in restores] == [OK] * clients
    finally:
        for r in restores:
            r.kill()
            r.wait()
    assert read_safetensors(tmp_path / "0.safetensors")[0] == read_safetensors(tmp_path / "t.safetensors")[0]
    for i in range(1, clients):
        assert filecmp.cmp(tmp_path / "0.safetensors", tmp_path / f"{i}.safetensors", shallow=False)
    now_disk, now_sent = figures()
    assert now_sent - sent >= clients * plain
    assert now_disk - disk < 2.3 * plain, f"{(now_disk - disk) / plain:.2f} times from disk"
