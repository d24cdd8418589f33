# SPDX-License-Identifier: Apache-2.0
"""larder tenant and larder key: new tenants and users, isolation, expired certificates, rotation of keys; a wrong or missing KEK is
told as that, and not as damage."""
import json
import os
import random
import stat
import subprocess
import time

import pytest
from conftest import CONFLICT, DENIED, KEY, LARDER, MISSING, SPACE, edited_credentials, read_safetensors, write_safetensors

ONE = {"t": ("U8", [4], b"abcd")}


@pytest.fixture
def file(tmp_path):
    write_safetensors(tmp_path / "in.safetensors", ONE)
    return tmp_path / "in.safetensors"


def test_add_and_isolation(server, file, tmp_path):
    out = tmp_path / "acme.json"
    server.larder("tenant", "add", "acme", "--ca", server.folder, "--out", out, "--quota", "1G", "--weight", 3, "--residency",
                  "eu")
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o600
    listed = {t["name"]: t for t in server.json("tenant", "ls")}
    assert {"dev", "acme"} <= set(listed)
    assert (listed["acme"]["quota_bytes"], listed["acme"]["weight"], listed["acme"]["residency"]) == (1 << 30, 3, "eu")

    server.larder("ckpt", "save", "secret", 1, file)
    server.larder("ckpt", "show", "secret", credentials=out, status=MISSING)
    assert server.json("ckpt", "ls", credentials=out) == []
    server.larder("ckpt", "save", "secret", 5, file, credentials=out)
    assert server.json("ckpt", "show", "secret", credentials=out)["step"] == 5
    assert server.json("ckpt", "show", "secret")["step"] == 1
    server.larder("tenant", "ls", credentials=out, status=DENIED)

    server.larder("tenant", "add", "acme", "--ca", server.folder, "--out", tmp_path / "x.json", status=CONFLICT)
    assert not (tmp_path / "x.json").exists()
    server.larder("tenant", "add", "acme2", "--ca", server.folder, "--out", out, status=CONFLICT)
    reader = tmp_path / "reader.json"
    server.larder("tenant", "add", "acme", "--ca", server.folder, "--role", "reader", "--keks-from", out, "--out", reader)
    server.larder("ckpt", "restore", "secret", tmp_path / "o.safetensors", credentials=reader)
    assert read_safetensors(tmp_path / "o.safetensors")[0] == ONE
    server.larder("ckpt", "save", "secret", 6, file, credentials=reader, status=DENIED)


def test_add_needs_the_authority(server, tmp_path):
    server.larder("tenant", "add", "nobody", "--ca", tmp_path / "absent", "--out", tmp_path / "o.json", status=MISSING)
    server.larder("tenant", "add", "nobody", "--ca", server.folder, "--out", tmp_path / "o.json", role="writer", status=DENIED)
    assert not (tmp_path / "o.json").exists()
    assert "nobody" not in {t["name"] for t in server.json("tenant", "ls")}


def issue(folder, work, uri, start, end):
    """A user certificate by openssl, with dates of our choice."""
    (work / "ca.conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={work}/index\nserial={work}/serial\nnew_certs_dir={work}\ndefault_md=sha256\n"
        f"policy=p\nx509_extensions=e\nunique_subject=no\n[p]\ncommonName=optional\n[e]\nsubjectAltName=URI:{uri}\n"
        "extendedKeyUsage=clientAuth\nkeyUsage=digitalSignature\nbasicConstraints=CA:FALSE\n")
    (work / "index").write_text("")
    (work / "serial").write_text("1234\n")
    run = lambda *words: subprocess.run(["openssl", *words], check=True, cwd=work, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)
    run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "raw.key")
    run("pkcs8", "-topk8", "-nocrypt", "-in", "raw.key", "-out", "user.key")
    run("req", "-new", "-key", "user.key", "-subj", "/CN=user", "-out", "user.csr")
    run("ca", "-batch", "-config", "ca.conf", "-cert", str(folder / "ca.pem"), "-keyfile", str(folder / "ca.key"), "-in",
        "user.csr", "-out", "user.pem", "-startdate", start, "-enddate", end, "-notext")
    return (work / "user.pem").read_text(), (work / "user.key").read_text()


def test_certificates(server, tmp_path):
    """Expired, of another authority, and a server that is not the one of our authority."""
    certificate, key = issue(server.folder, tmp_path, "larder://dev/admin", "20200101000000Z", "20210101000000Z")
    expired = edited_credentials(server.credentials(), tmp_path / "expired.json", certificate=certificate, key=key)
    done = server.larder("ckpt", "ls", credentials=expired, status=DENIED)
    assert "expired" in done.stderr or "2021" in done.stderr
    certificate, key = issue(server.folder, tmp_path, "larder://dev/admin", "20200101000000Z", "20400101000000Z")
    good = edited_credentials(server.credentials(), tmp_path / "good.json", certificate=certificate, key=key)
    server.larder("ckpt", "ls", credentials=good)

    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
                    "/CN=other", "-keyout", "ca.key", "-out", "ca.pem", "-days", "10"], check=True, cwd=tmp_path,
                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    certificate, key = issue(tmp_path, tmp_path, "larder://dev/admin", "20200101000000Z", "20400101000000Z")
    forged = edited_credentials(server.credentials(), tmp_path / "forged.json", certificate=certificate, key=key)
    server.larder("ckpt", "ls", credentials=forged, status=DENIED)
    distrust = edited_credentials(server.credentials(), tmp_path / "distrust.json", ca=(tmp_path / "ca.pem").read_text())
    server.larder("ckpt", "ls", credentials=distrust, status=DENIED)
    mixed = edited_credentials(server.credentials(), tmp_path / "mixed.json", key=key)
    server.larder("ckpt", "ls", credentials=mixed, status=DENIED)


def epochs(path):
    return [k["epoch"] for k in json.loads(path.read_text())["keks"]]


def test_key_rotation(own_server, file, tmp_path):
    own_server.larder("ckpt", "save", "run", 1, file)
    own_server.larder("dataset", "import", "docs", file, "--format", "whole")
    admin, reader, writer = (own_server.credentials(r) for r in ("admin", "reader", "writer"))
    before = tmp_path / "before.json"
    before.write_bytes(admin.read_bytes())
    os.chmod(before, 0o600)

    done = own_server.json("key", "rotate", "--also", reader)
    assert done == {"epoch": 2, "rewrapped": 2, "resumed": False, "dropped_old": False}
    assert epochs(admin) == epochs(reader) == [1, 2] and epochs(writer) == [1]
    assert stat.S_IMODE(os.stat(admin).st_mode) == 0o600
    assert own_server.json("ckpt", "ls")[0]["key_epoch"] == 2
    for who in (admin, reader, writer):
        own_server.larder("ckpt", "show", "run", credentials=who)

    # Written to the file, but interrupted before anything was wrapped: the next call finishes it.
    keys = json.loads(admin.read_text())["keks"] + [{"epoch": 3, "key": random.Random(9).randbytes(32).hex()}]
    edited_credentials(admin, admin, keks=keys)
    done = own_server.json("key", "rotate", "--drop-old", "--also", f"{reader}")
    assert done == {"epoch": 3, "rewrapped": 2, "resumed": True, "dropped_old": True}
    assert epochs(admin) == epochs(reader) == [3]
    own_server.larder("ckpt", "restore", "run", tmp_path / "o.safetensors", credentials=reader)
    assert read_safetensors(tmp_path / "o.safetensors")[0] == ONE
    assert own_server.larder("dataset", "cat", "docs", file.name, binary=True).stdout == file.read_bytes()
    for old in (writer, before):
        own_server.larder("ckpt", "show", "run", credentials=old, status=KEY)


def test_two_rotations_at_once(own_server, file, tmp_path):
    """Two users gave one epoch two keys. The second is told, drops nothing, and comes out of it by another epoch; a run
    whose key is lost does not keep the others from being rotated."""
    for run in ("b", "c"):
        own_server.larder("ckpt", "save", run, 1, file)
    admin, operator = (own_server.credentials(r) for r in ("admin", "operator"))
    keys = json.loads(operator.read_text())["keks"] + [{"epoch": 2, "key": random.Random(3).randbytes(32).hex()}]
    edited_credentials(operator, operator, keks=keys)
    own_server.larder("key", "rotate")
    lost = edited_credentials(admin, tmp_path / "lost.json", keks=[{"epoch": 1, "key": "ab" * 32}])
    own_server.larder("ckpt", "save", "a", 1, file, credentials=lost)
    done = own_server.larder("key", "rotate", "--drop-old", credentials=operator, status=KEY)
    assert "3 keys were not rotated" in done.stderr and "run a" in done.stderr
    assert epochs(operator) == [1, 2]
    done = own_server.larder("key", "rotate", "--new", credentials=operator, status=KEY)
    assert "1 keys were not rotated" in done.stderr and "run a" in done.stderr
    assert {r["name"]: r["key_epoch"] for r in own_server.json("ckpt", "ls")} == {"a": 1, "b": 3, "c": 3}
    for who in (admin, operator):
        own_server.larder("ckpt", "show", "b", credentials=who)
    own_server.larder("ckpt", "show", "a", credentials=lost)


def test_key_rotation_refuses_foreign_files(own_server, file, tmp_path):
    own_server.larder("ckpt", "save", "run", 1, file)
    other = tmp_path / "other.json"
    own_server.larder("tenant", "add", "other", "--ca", own_server.folder, "--out", other)
    was, before = other.read_bytes(), own_server.credentials().read_bytes()
    own_server.larder("key", "rotate", "--also", other, status=2)
    own_server.larder("key", "rotate", "--also", tmp_path / "absent.json", status=MISSING)
    assert own_server.credentials().read_bytes() == before  # no new epoch was left behind
    assert other.read_bytes() == was


def test_quota(server, tmp_path):
    out = tmp_path / "small.json"
    server.larder("tenant", "add", "small", "--ca", server.folder, "--out", out, "--quota", "2M")
    write_safetensors(tmp_path / "fits.safetensors", {"t": ("U8", [500000], random.Random(1).randbytes(500000))})
    write_safetensors(tmp_path / "large.safetensors", {"t": ("U8", [5000000], random.Random(2).randbytes(5000000))})
    server.larder("ckpt", "save", "run", 1, tmp_path / "fits.safetensors", credentials=out)
    done = server.larder("ckpt", "save", "run", 2, tmp_path / "large.safetensors", credentials=out, status=SPACE)
    assert "quota" in done.stderr
    done = server.larder("dataset", "import", "d", tmp_path / "large.safetensors", "--format", "whole", credentials=out,
                         status=SPACE)
    assert "quota" in done.stderr
    # What was taken for the save that failed is given back, and the older checkpoint is whole.
    server.larder("ckpt", "save", "run", 3, tmp_path / "fits.safetensors", credentials=out)
    assert [c["step"] for c in server.json("ckpt", "ls", "run", credentials=out) if c["state"] == "good"] == [1, 3]
    assert server.json("ckpt", "verify", "--level", "deep", credentials=out)["damaged"] == 0
    used = {t["name"]: t for t in server.json("tenant", "ls")}["small"]
    assert 1000000 < used["used_bytes"] <= used["quota_bytes"] == 2 << 20


def test_key_rotation_asks_before_it_writes(own_server, file, tmp_path):
    own_server.larder("ckpt", "save", "run", 1, file)
    for role, words in (("reader", []), ("writer", ["--drop-old"])):
        was = own_server.credentials(role).read_bytes()
        own_server.larder("key", "rotate", *words, role=role, status=DENIED)
        assert own_server.credentials(role).read_bytes() == was
    own_server.larder("key", "rotate")
    # Another user, who has not got the new key, must not make a second key of that epoch.
    was = own_server.credentials("operator").read_bytes()
    done = own_server.larder("key", "rotate", role="operator", status=KEY)
    assert "epoch 2" in done.stderr and own_server.credentials("operator").read_bytes() == was
    own_server.larder("ckpt", "show", "run", role="writer")


def test_key_rotation_survives_kills(own_server, file, tmp_path):
    """Killed at any moment, then called once more: every run opens, with the keys that the file holds."""
    seed = os.environ.get("LARDER_TEST_SEED", str(random.randrange(1 << 32)))
    print("LARDER_TEST_SEED =", seed)
    rng = random.Random(seed)
    for i in range(8):
        own_server.larder("ckpt", "save", f"run {i}", 1, file)
    env = dict(os.environ, LARDER_CREDENTIALS=str(own_server.credentials()))
    for i in range(12):
        process = subprocess.Popen([str(LARDER), "key", "rotate", "--drop-old"], env=env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.wait()
        own_server.larder("ckpt", "show", f"run {i % 8}")
    done = own_server.json("key", "rotate", "--drop-old")
    assert epochs(own_server.credentials()) == [done["epoch"]] and done["dropped_old"]
    for i in range(8):
        own_server.larder("ckpt", "show", f"run {i}")
    left = [p.name for p in own_server.folder.iterdir() if p.name.startswith("dev-admin.json")]
    assert len(left) <= 12, left
