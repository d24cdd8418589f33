# SPDX-License-Identifier: Apache-2.0
"""Goal: what is secret stays with its owner: not in the store's files, not in a log, and no key in what a core file would hold.

Method: canaries in a checkpoint (plain bytes, a tensor's name, the file's metadata), the tenant's KEK in several spellings and a
user's private key; they are looked for in every file of the store, in all output, and in the memory of a larderd and of a `larder
ckpt save` that are stopped at work, the client at many moments of its start, where it reads its keys. Memory is read as the kernel
would dump it: regions marked "do not dump" are left out. Each search must find something that is there by design, so that finding
nothing means something. Keys that a cipher is at work with (a segment's, TLS's) stand in memory of the library and are not looked
for.
"""
import base64
import json
import os
import re
import secrets
import signal
import subprocess
import time

import pytest

from conftest import LARDER, Server, run_larder, write_safetensors


class Canaries:
    """Each spelling of each secret, with what to call it."""

    def __init__(self, server):
        mark = secrets.token_hex(8)
        self.run, self.tensor = f"public-{mark}", f"tensor-{mark}"
        self.plain, self.metadata = f"plain-{mark}".encode(), f"metadata-{mark}"
        credentials = json.loads(server.credentials("writer").read_text())
        self.keys = [(f"KEK of epoch {k['epoch']}{how}", spelt) for k in credentials["keks"]
                     for how, spelt in self.spellings(bytes.fromhex(k["key"]))]
        self.keys.append(("private key of TLS", credentials["key"].splitlines()[1].encode()))
        self.secrets = [("plain bytes", self.plain), ("tensor's name", self.tensor.encode()), ("metadata", self.metadata.encode()), *self.keys]

    @staticmethod
    def spellings(key):
        return (("", key), (" in hexadecimal", key.hex().encode()), (" in capitals", key.hex().upper().encode()),
                (" in base64", base64.b64encode(key).rstrip(b"=")))

    def file(self, path, mebibytes):
        raw = b"".join((self.plain + i.to_bytes(8, "little") + os.urandom(4064 - len(self.plain) - 8)).ljust(4096, b".") for i in range(256 * mebibytes))
        write_safetensors(path, {self.tensor: ("U8", [len(raw)], raw)}, {"note": self.metadata})
        return path


def found_in(data, wanted):
    return {what for what, spelt in wanted if spelt in data}


def dumped(pid, wanted):
    """Which of the wanted a core file of the process would hold."""
    found = set()
    try:
        smaps = open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace").read()
        memory = open(f"/proc/{pid}/mem", "rb", buffering=0)
    except PermissionError:
        pytest.skip("the memory of other processes cannot be read here (needs root)")
    except ProcessLookupError:
        return found  # it has just ended
    with memory:
        for region in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps) if smaps else ():
            begin, end = (int(x, 16) for x in re.match(r"([0-9a-f]+)-([0-9a-f]+)", region).groups())
            flags = re.search(r"VmFlags:(.*)", region)
            if flags is None or {"dd", "io"} & set(flags[1].split()) or "[v" in region.split("\n")[0]:
                continue
            if sum(int(n) for n in re.findall(r"^(?:Rss|Swap): *(\d+)", region, re.M)) == 0:
                continue  # nothing of it is there; sanitizers reserve terabytes
            for at in range(begin, end, 16 << 20):
                try:
                    memory.seek(at)
                    found |= found_in(memory.read(min(end - at, (16 << 20) + 4096)), wanted)
                except OSError:
                    pass  # a page that nobody could dump
    return found


@pytest.fixture
def server(tmp_path):
    """Started twice: the first start made the keys, as `--dev` does."""
    s = Server(tmp_path / "dev")
    s.stop()
    s.start()
    yield s
    s.stop()


def test_store_and_logs_hold_no_secret(server, tmp_path):
    c = Canaries(server)
    file = c.file(tmp_path / "w.safetensors", 2)
    said = b""
    for words in (("save", c.run, 1, file), ("ls", c.run), ("verify", c.run, "--level", "deep"), ("prune", c.run, "--keep-last", 1)):
        done = run_larder("ckpt", *words, credentials=server.credentials(), binary=True)
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    (server.folder / "wrong.safetensors").write_bytes(file.read_bytes()[:-5])
    refused = run_larder("ckpt", "save", c.run, 2, server.folder / "wrong.safetensors", credentials=server.credentials(), binary=True)
    assert refused.returncode != 0
    (server.folder / "wrong.safetensors").unlink()
    said += refused.stderr
    files = [p for p in (server.folder / "store").rglob("*") if p.is_file()]
    assert any(c.run.encode() in p.read_bytes() for p in files)  # the name of a run is no secret
    for path in files:
        assert found_in(path.read_bytes(), c.secrets) == set(), path
    assert found_in(server.log.read_bytes(), c.secrets) == set()
    assert found_in(said, c.keys + [("plain bytes", c.plain), ("metadata", c.metadata.encode())]) == set()


def test_a_core_of_the_server_holds_no_secret(server, tmp_path):
    c = Canaries(server)
    server.larder("ckpt", "save", c.run, 1, c.file(tmp_path / "w.safetensors", 8))
    server.larder("ckpt", "restore", c.run, 1, tmp_path / "back.safetensors")
    server.process.send_signal(signal.SIGSTOP)
    try:
        found = dumped(server.process.pid, [("run", c.run.encode()), *c.secrets])
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert found == {"run"}


def test_a_core_of_a_client_holds_no_key(server, tmp_path):
    c = Canaries(server)
    file = c.file(tmp_path / "w.safetensors", 96)
    seen = set()
    for delay in (*(i / 1000 for i in range(1, 33)), 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 4, 8):
        if delay >= 1 and "plain bytes" in seen:
            break  # only a slow machine takes so long to begin
        env = dict(os.environ, LARDER_CREDENTIALS=str(server.credentials("writer")))
        p = subprocess.Popen([LARDER, "ckpt", "save", c.run, "1", file], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
        time.sleep(delay)  # each is another moment of a save; which one does not matter
        p.send_signal(signal.SIGSTOP)
        if p.poll() is None:
            seen |= dumped(p.pid, c.secrets)
        p.kill()
        p.wait(60)
    assert "plain bytes" in seen, "no save was met at work"
    assert seen & {what for what, _ in c.keys} == set()
