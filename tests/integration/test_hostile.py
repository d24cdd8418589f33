# SPDX-License-Identifier: Apache-2.0
"""Goal: whoever comes to the port, with a certificate or without, is refused or bounded, and a good client is served meanwhile.

Method: a real larderd on loopback; strangers that trickle, talk nonsense, open connections by the hundred or a lane without a
ticket; users with a good certificate that announce more than they send and ask without ever reading. Beside them a client
saves and restores on and on, and the memory of the server is watched. Other refusals are proven in test_protocol.py (TLS 1.2,
broken frames) and test_larder_tenant.py (expired certificates, other authorities)."""
import pathlib
import random
import re
import socket
import subprocess
import threading
import time

import pytest

from conftest import MISSING, Server, closed_port, read_safetensors, write_safetensors
from test_larderd import HELLO, answer, connect, frame

HANDSHAKE_S = 2
PATIENCE_S = 60
GROWS_MIB = 384  # all hostile peers together; the budgets of larderd.conf are below that
OP_PING, OP_SEGMENT_CHUNK = 2, 22


@pytest.fixture
def server(tmp_path):
    s = Server(tmp_path / "dev", "--listen", f"127.0.0.1:{closed_port()}")
    s.stop()
    config = s.folder / "larderd.conf"
    config.write_text(config.read_text().replace("[server]\n", f"[server]\nhandshake = {HANDSHAKE_S}s\n", 1))
    s.start()
    yield s
    s.stop()


def dial(server):
    host, port = (server.folder / "address").read_text().strip().rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def closed_within(s, seconds):
    """The peer ends the connection in time, whatever it says before."""
    s.settimeout(seconds)
    try:
        while s.recv(65536):
            pass
    except socket.timeout:
        return False
    except OSError:
        pass
    return True


def trickle(server):
    """A byte at a time of what would be a TLS record: cut off when the time of a handshake is over."""
    start = time.monotonic()
    with dial(server) as s:
        try:
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500):
                s.send(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() - start < HANDSHAKE_S + 20
        except OSError:
            return
        assert closed_within(s, HANDSHAKE_S + 20)


def silence(server):
    with dial(server) as s:
        assert closed_within(s, HANDSHAKE_S + 20)


def nonsense(server):
    for first in (b"GET / HTTP/1.1\r\nHost: larder\r\n\r\n", b"SSH-2.0-x\r\n", b"LRD1" + bytes(60), random.randbytes(5000), b"\x16\x03\x01\xff\xff" + bytes(70000)):
        with dial(server) as s:
            try:
                s.sendall(first)
            except OSError:
                continue
            assert closed_within(s, HANDSHAKE_S + 20), first[:20]


def lane_without_ticket(server):
    for opening in (b"LRLN" + b"\1\0\0\0" + random.randbytes(16) + random.randbytes(16), b"LRLN" + b"\2\0\0\0" + bytes(32), b"LRLN" + random.randbytes(36)):
        with dial(server) as s:
            s.sendall(opening)
            assert closed_within(s, HANDSHAKE_S + 20)


def many_connections(server):
    held = [dial(server) for _ in range(300)]
    for s in held:
        assert closed_within(s, HANDSHAKE_S + 20)
        s.close()


def announces_and_sends_nothing(server):
    """Payloads of 4 MiB each are announced; a few bytes come."""
    sessions = []
    for i in range(40):
        s = connect(server.folder, "writer")
        s.sendall(HELLO)
        answer(s)
        whole = frame(OP_SEGMENT_CHUNK, 2, bytes(4096))
        s.sendall(whole[:12] + (4 << 20).to_bytes(4, "little") + whole[16:])
        sessions.append(s)
    time.sleep(2)
    for s in sessions:
        s.close()


def asks_and_never_reads(server):
    with connect(server.folder, "reader") as s:
        s.sendall(HELLO)
        answer(s)
        s.settimeout(3)
        try:
            for i in range(200):
                s.sendall(b"".join(frame(OP_PING, 2 + 1000 * i + k) for k in range(1000)))
        except OSError:
            pass  # it does not take more than it can answer, or has given us up


HOSTILE = (trickle, silence, nonsense, lane_without_ticket, many_connections, announces_and_sends_nothing, asks_and_never_reads)


def resident_mib(pid, what="VmRSS"):
    return int(re.search(rf"{what}:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) >> 10


def test_a_good_client_is_served_among_hostile_peers(server, tmp_path):
    good = {"w": ("F32", [50000], random.randbytes(200000))}
    write_safetensors(tmp_path / "w.safetensors", good)
    server.larder("ckpt", "save", "good", 1, tmp_path / "w.safetensors")
    before, wrong = resident_mib(server.process.pid), []

    def attack(how):
        try:
            how(server)
        except BaseException as e:  # told by the test, not by the thread
            wrong.append(f"{how.__name__}: {e!r}")

    threads = [threading.Thread(target=attack, args=(how,)) for how in HOSTILE for _ in range(20 if how is trickle else 1)]
    for thread in threads:
        thread.start()
    step, served = 1, 0
    while any(thread.is_alive() for thread in threads) or served < 3:
        step += 1
        server.larder("ckpt", "save", "good", step, tmp_path / "w.safetensors")
        server.larder("ckpt", "restore", "good", step, tmp_path / "back.safetensors")
        assert read_safetensors(tmp_path / "back.safetensors")[0] == good
        (tmp_path / "back.safetensors").unlink()
        served += 1
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.process.poll() is None
    grown = resident_mib(server.process.pid, "VmHWM") - before
    print(f"served {served} times, memory grew by {grown} MiB at most")
    assert grown < GROWS_MIB
    server.larder("ckpt", "verify", "--level", "deep")
    server.stop()
    assert server.process.returncode == 0


def test_another_tenant_s_certificate_opens_nothing(server, tmp_path):
    write_safetensors(tmp_path / "w.safetensors", {"w": ("U8", [1000], bytes(1000))})
    server.larder("ckpt", "save", "mine", 1, tmp_path / "w.safetensors")
    other = tmp_path / "other.json"
    server.larder("tenant", "add", "other", "--ca", server.folder, "--out", other)
    assert server.json("ckpt", "ls", credentials=other) == []
    for words in (("restore", "mine", 1, tmp_path / "o.safetensors"), ("show", "mine")):
        server.larder("ckpt", *words, credentials=other, status=MISSING)
    assert [c["state"] for c in server.json("ckpt", "ls", "mine")] == ["good"]


def test_early_data_is_not_taken(server, tmp_path):
    connect(server.folder, "reader").close()  # writes the file that holds certificate and key
    (tmp_path / "hello").write_bytes(HELLO)
    words = ["openssl", "s_client", "-connect", (server.folder / "address").read_text().strip(), "-cert", server.folder / "test-reader.pem",
             "-alpn", "larder/1", "-CAfile", server.folder / "ca.pem", "-tls1_3"]
    run = lambda *more: subprocess.run([*words, *more], input=b"", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S).stdout
    first = run("-sess_out", tmp_path / "session")
    assert b"Verify return code: 0 (ok)" in first, first.decode(errors="replace")
    if not (tmp_path / "session").exists():
        assert b"Early data was accepted" not in first  # it gives no tickets: there is nothing to begin early with
        return
    again = run("-sess_in", tmp_path / "session", "-early_data", tmp_path / "hello")
    assert b"Early data was accepted" not in again, again.decode(errors="replace")
