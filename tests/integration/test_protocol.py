# SPDX-License-Identifier: Apache-2.0
"""Goal: PROTOCOL.md is complete, and larderd keeps it. Method: a second client, written from that document and sharing
no code with client/, saves and reads a checkpoint over TLS, and does what is not allowed. Opcodes and messages are read
from the document's own lines; segments are written as FORMAT.md says, and read by test_format's reader."""
import ctypes
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import ssl
import struct
import subprocess
import time

import pytest

from test_format import Cursor, crypto, envelope_open, hkdf, private_read, segment_read, xxh64, xxh128

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / os.environ.get("BUILD", "build")
DOCUMENT = (ROOT / "format/PROTOCOL.md").read_text()
KINDS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "id": 16, "hash": 32, "entry": 40, "str": "H", "bytes": "I"}
MESSAGES = {name: [field.split() for field in fields.split(", ")] for name, fields in
            re.findall(r"^    (\w+) +((?:\w+ \w+)(?:, \w+ \w+)*)$", DOCUMENT, re.M) if fields.split()[0] in KINDS}
OPCODES = {name: int(number) for number, name in re.findall(r"^    (\d+) +([a-z_]+)", DOCUMENT.split("## 12.")[0], re.M)}
CLASSES = {int(number): name.strip() for number, name in
           re.findall(r"^    (\d+) +(\S+(?: \S+)?) {2,}", DOCUMENT.split("## 12.")[1], re.M)}
REQUEST_OF = {"tenant_list": "list", "published_list": "list"}
REPLY_OF = {name: "list_reply" for name in ("tenant_list", "run_list", "commit_list", "published_list")}
RESPONSE, ERROR, MORE = 1, 2, 4
PATIENCE_S = 20


def encode(message, /, **values):
    out = b""
    for kind, field in MESSAGES[message]:
        value = values.pop(field, b"" if kind in ("str", "bytes") else bytes(KINDS[kind]) if isinstance(KINDS[kind], int) else 0)
        if isinstance(KINDS[kind], int):
            assert len(value) == KINDS[kind]
            out += value
        elif kind in ("str", "bytes"):
            value = value.encode() if isinstance(value, str) else value
            out += struct.pack("<" + KINDS[kind], len(value)) + value
        else:
            out += struct.pack("<" + KINDS[kind], value)
    assert not values, f"{message} has no {values}"
    return out


def decode(message, c):
    out = {}
    for kind, field in MESSAGES[message]:
        if isinstance(KINDS[kind], int):
            out[field] = c.take(KINDS[kind])
        elif kind in ("str", "bytes"):
            data = c.take(c.one(KINDS[kind]))
            out[field] = data.decode() if kind == "str" else data
        else:
            out[field] = c.one(KINDS[kind])
    return out


def items(message, data):
    c, out = Cursor(data), []
    while c.at < len(data):
        out.append(decode(message, c))
    return out


class Refused(Exception):
    def __init__(self, payload):
        self.error = decode("error", Cursor(payload))
        self.kind = CLASSES[self.error["class"]]
        super().__init__(f'{self.kind}: {self.error["text"]}')


class Closed(Exception):
    pass


class Client:
    def __init__(self, server, role, hello=True, alpn=("larder/1",), version=ssl.TLSVersion.TLSv1_3, certificate=True,
                 features=1):
        who = server.credentials[role]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = context.maximum_version = version
        context.load_verify_locations(cadata=who["ca"])
        if certificate:
            context.load_cert_chain(server.pem(role))
        if alpn:
            context.set_alpn_protocols(list(alpn))
        host, port = who["server"].rsplit(":", 1)
        raw = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.sock = context.wrap_socket(raw, server_hostname=host)
        self.last, self.kept, self.waits, self.waited_ms = 0, {}, bool(features & 1 << 2), 0
        if hello:
            self.hello = self.call("hello", features=features, software="second client")

    def send(self, opcode, payload=b"", id=0, flags=0, deadline=0, magic=0x3144524C, version=1, length=None, reserved=0):
        self.sock.sendall(struct.pack("<IHHIIQII", magic, version, opcode, flags, len(payload) if length is None else length,
                                      id, deadline, reserved) + payload)

    def exactly(self, n):
        out = b""
        while len(out) < n:
            piece = self.sock.recv(n - len(out))
            if not piece:
                raise Closed
            out += piece
        return out

    def frame(self):
        magic, version, opcode, flags, n, id, deadline, zero = struct.unpack("<IHHIIQII", self.exactly(32))
        assert (magic, version, zero) == (0x3144524C, 1, 0) and flags & RESPONSE and flags < 8
        assert deadline == 0 or (self.waits and opcode == OPCODES["read"] and not flags & ERROR)
        self.waited_ms += deadline
        return opcode, flags, id, self.exactly(n)

    def begin(self, name, tail=b"", /, deadline=0, **fields):
        self.last += 1
        message = REQUEST_OF.get(name, name)
        self.send(OPCODES[name], (encode(message, **fields) if message in MESSAGES else b"") + tail, self.last, deadline=deadline)
        self.kept[self.last] = []
        return self.last

    def next(self, id):
        """(payload, whether more follow) of the next frame of a request; others are kept for their time."""
        while not self.kept[id]:
            opcode, flags, of, payload = self.frame()
            self.kept[of].append((flags, payload))
        flags, payload = self.kept[id].pop(0)
        if flags & ERROR:
            raise Refused(payload)
        return payload, bool(flags & MORE)

    def end(self, id, name):
        payload, more = self.next(id)
        assert not more and not self.kept[id]
        reply = REPLY_OF.get(name, name + "_reply")
        c = Cursor(payload)
        out = decode(reply, c) if reply in MESSAGES else {}
        c.end()
        return out

    def call(self, name, tail=b"", /, **fields):
        return self.end(self.begin(name, tail, **fields), name)

    def refused(self, name, tail=b"", /, **fields):
        with pytest.raises(Refused) as caught:
            self.call(name, tail, **fields)
        return caught.value.kind, caught.value.error["text"]

    def close(self):
        self.sock.close()


class Server:
    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen([BUILD / "larderd", "--dev", folder, "--listen", "127.0.0.1:0"], text=True,
                                        stdout=subprocess.PIPE, stderr=(folder.parent / "larderd.log").open("w"))
        said = ""
        while "is ready at" not in said:
            line = self.process.stdout.readline()
            assert line, (folder.parent / "larderd.log").read_text()
            said += line
        self.credentials = {role: json.loads((folder / f"dev-{role}.json").read_text())
                            for role in ("admin", "writer", "reader", "operator")}

    def pem(self, role):
        path = self.folder.parent / f"{role}.pem"
        path.write_text(self.credentials[role]["certificate"] + self.credentials[role]["key"])
        return path

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    s = Server(tmp_path_factory.mktemp("larder") / "dev")
    yield s
    s.stop()


@pytest.fixture
def connect(server):
    opened = []

    def one(role, **options):
        opened.append(Client(server, role, **options))
        return opened[-1]
    yield one
    for c in opened:
        c.close()


def gcm_seal(key, nonce, ad, plain):
    p = ctypes.c_void_p
    ctx = p(crypto.EVP_CIPHER_CTX_new())
    out, tag, n = ctypes.create_string_buffer(len(plain) + 16), ctypes.create_string_buffer(16), ctypes.c_int()
    assert crypto.EVP_EncryptInit_ex(ctx, p(crypto.EVP_aes_256_gcm()), None, key, nonce) == 1
    assert crypto.EVP_EncryptUpdate(ctx, None, ctypes.byref(n), ad, len(ad)) == 1
    if plain:
        assert crypto.EVP_EncryptUpdate(ctx, out, ctypes.byref(n), plain, len(plain)) == 1
    assert crypto.EVP_EncryptFinal_ex(ctx, ctypes.create_string_buffer(16), ctypes.byref(n)) == 1
    assert crypto.EVP_CIPHER_CTX_ctrl(ctx, 0x10, 16, tag) == 1
    crypto.EVP_CIPHER_CTX_free(p(ctx.value))
    return out.raw[:len(plain)] + tag.raw


def envelope_make(kek, epoch, tenant, run, dek_id, dek):
    label = b"larder/1 envelope"
    head = struct.pack("<IIII", 1, 1, epoch, 0) + run + dek_id + tenant.ljust(64, b"\0") + os.urandom(32)
    info = struct.pack("<H", len(label)) + label + head[:12] + run + tenant.ljust(64, b"\0")
    okm = hkdf(kek, head[-32:], info, 64)
    ad = b"LARDENVL" + head + okm[32:]
    body = ad + gcm_seal(okm[:32], bytes(12), ad, dek) + bytes(16)
    return struct.pack("<Q", xxh64(body)) + body


def block(body):
    body = body.ljust(4088, b"\0")
    return struct.pack("<Q", xxh64(body)) + body


class Run:
    """A run with its key, opened or made as section 6 says."""

    def __init__(self, client, name, create=True):
        kek = client_kek(client)
        opened = client.call("run_open", kind=1, name=name, create=int(create), run_id=os.urandom(16) if create else bytes(16))
        if not opened["envelopes"]:
            client.call("envelope_put", run_id=opened["run_id"],
                        envelope=envelope_make(kek[1], kek[0], b"dev", opened["run_id"], os.urandom(16), os.urandom(32)))
            opened = client.call("run_open", kind=1, name=name)
        self.name, self.id, self.envelope = name, opened["run_id"], opened["envelopes"][:256]
        self.dek_id, self.dek = self.envelope[48:64], envelope_open(self.envelope, kek[1])


def client_kek(client):
    kek = json.loads(client.credentials_text)["keks"][0]
    return kek["epoch"], bytes.fromhex(kek["key"])


class Part:
    """One segment under way: chunks of raw bytes, or of zeros (None)."""

    def __init__(self, run, attempt, step, rank, world, plains):
        self.run, self.attempt, self.step, self.rank, self.world = run, attempt, step, rank, world
        self.id, salt, tenant, label = os.urandom(16), os.urandom(32), b"dev", b"larder/1 segment"
        info = (struct.pack("<H", len(label)) + label + struct.pack("<IIH", 1, 1, len(tenant)) + tenant + run.id +
                struct.pack("<Q", step) + attempt + struct.pack("<II", rank, world) + self.id + run.dek_id)
        okm = hkdf(run.dek, salt, info, 64)
        self.key = okm[:32]
        self.context = (struct.pack("<IIIIIQ", 1, 1, rank, world, 0, step) + run.id + attempt + self.id + run.dek_id +
                        tenant.ljust(64, b"\0"))
        self.header = block(b"LARDSEGM" + struct.pack("<II", 1, 1) + self.id + run.id + attempt +
                            struct.pack("<QII", step, rank, world) + salt + run.dek_id + okm[32:] + tenant)
        self.plains = [bytes(4000) if p is None else p for p in plains]
        self.entries, self.stored, at = [], [], 4096
        for i, plain in enumerate(plains):
            own = struct.pack("<IIIBBH", i, i + 1 == len(plains), len(self.plains[i]), 0, 1, 0)
            stored = b"" if plain is None else self.seal(1, i, own, plain)
            self.stored.append(stored)
            self.entries.append(struct.pack("<QIIBB6x", at if stored else 0, len(stored), len(self.plains[i]),
                                            0 if stored else 1, 1) + (xxh128(stored) if stored else bytes(16)))
            at += (len(stored) + 4095) // 4096 * 4096
        self.finish(at)

    def seal(self, domain, counter, own, plain):
        return gcm_seal(self.key, struct.pack("<IQ", domain, counter), struct.pack("<I", domain) + self.context + own, plain)

    def finish(self, index_offset):
        self.index_offset = index_offset
        body = b"LARDINDX" + struct.pack("<IIQ", 1, len(self.entries), 0) + b"".join(self.entries)
        public = struct.pack("<Q", xxh64(body)) + body
        private = struct.pack("<6I", 1, len(self.entries), len(self.plains), 0, 0, 0) + b"".join(map(xxh128, self.plains))
        for i, plain in enumerate(self.plains): # rank r's tensor i of rows [r, r + 1) of world
            name = f"layer.{i}".encode()
            part = 32 if self.world > 1 else 0  # a box, and not the whole
            private += struct.pack("<H", len(name)) + name + struct.pack("<BB", 1, 2 | part | 128)
            private += struct.pack("<2I", self.world, len(plain)) + (struct.pack("<4I", self.rank, 0, 1, len(plain)) if part else b"")
            private += struct.pack("<II", i, 0) + xxh128(plain)
        self.index = public + self.seal(2, 0, hashlib.sha256(public).digest(), private)
        self.digest = hashlib.sha256(self.index).digest()
        self.bytes = (index_offset + len(self.index) + 4095) // 4096 * 4096 + 4096
        own = (struct.pack("<I", 1) + self.id + struct.pack("<QQQQI", self.bytes, index_offset, len(self.index), len(public),
               len(self.entries)) + self.digest + bytes(8))
        self.trailer = block(b"LARDTRLR" + struct.pack("<II", 1, len(self.entries)) + self.id +
                             struct.pack("<QQQQ", self.bytes, index_offset, len(self.index), len(public)) + self.digest +
                             self.seal(3, 0, own, b""))

    def create(self, client):
        return client.call("segment_create", run_id=self.run.id, chunks=len(self.entries), reserve_bytes=self.bytes, header=self.header)

    def chunk(self, client, i):
        client.call("segment_chunk", self.stored[i], segment=self.id, number=i, entry=self.entries[i])

    def send(self, client):
        self.create(client)
        for i in [client.begin("segment_chunk", self.stored[i], segment=self.id, number=i, entry=self.entries[i])
                  for i in reversed(range(len(self.entries)))]:
            client.end(i, "segment_chunk")
        for at in range(0, len(self.index), 4096):
            client.call("segment_index", self.index[at:at + 4096], segment=self.id, index_offset=self.index_offset, offset=at)
        client.call("segment_seal", segment=self.id, trailer=self.trailer)

    def join(self, client, **more):
        return client.begin("join", run_id=self.run.id, step=self.step, attempt=self.attempt, rank=self.rank, world=self.world,
                            segment=self.id, segment_bytes=self.bytes, index_digest=self.digest,
                            plain_bytes=sum(map(len, self.plains)), **more)


@pytest.fixture
def writer(server, connect):
    def one(**options):
        c = connect("writer", **options)
        c.credentials_text = json.dumps(server.credentials["writer"])
        return c
    return one


def commit(clients, parts):
    """All parts are sealed: joins, answers the question for the check, returns the sequence that all hear."""
    joins = [p.join(c, loader=b"position 7") for p, c in zip(parts, clients)]
    asked = None
    while asked is None: # any of them may be asked; none is answered before
        for c, j in zip(clients, joins):
            c.sock.settimeout(0.05)
            try:
                payload, _ = c.next(j)
            except TimeoutError:
                continue
            finally:
                c.sock.settimeout(PATIENCE_S)
            asked = c, decode("join_reply", Cursor(payload))
            break
    c, question = asked
    assert question["state"] == 2
    assert [(p["rank"], p["segment"], p["segment_bytes"], p["index_digest"]) for p in items("join_part", question["parts"])] == [
        (p.rank, p.id, p.bytes, p.digest) for p in parts]
    p = parts[0]
    sequence = c.call("commit", run_id=p.run.id, step=p.step, attempt=p.attempt, world=p.world, verdict=0)["sequence"]
    again = parts[clients.index(c)].join(c, loader=b"position 7")
    for other, j in zip(clients, joins):
        heard = other.end(again if other is c else j, "join")
        assert (heard["state"], heard["sequence"]) == (1, sequence)
    return sequence


def read(client, run, ranges, credit, kind=1):
    """The bytes of (segment, offset, bytes), granting `credit` at a time."""
    data = b"".join(encode("read_range", object=o, offset=at, bytes=n) for o, at, n in ranges)
    id = client.begin("read", source=1, scope=run.id, credit=credit, count=len(ranges), ranges=data, **{"class": kind})
    out, granted, more = b"", credit, True
    while more:
        payload, more = client.next(id)
        out += payload
        assert len(out) <= granted
        if len(out) == granted and more:
            # The stream stands still, and the session does not.
            client.call("ping")
            assert not client.kept[id]
            client.send(OPCODES["credit"], encode("credit", request_id=id, bytes=credit), id)
            granted += credit
    return out


def test_hello_says_who_is_who(server, connect):
    store_ids = set()
    for number, role in enumerate(("reader", "writer", "operator", "admin"), 1):
        c = connect(role)
        assert (c.hello["tenant"], c.hello["role"], c.hello["features"]) == ("dev", number, 1)
        assert abs(c.hello["server_time_ns"] / 1e9 - time.time()) < 600 and c.hello["default_deadline_ms"] > 0
        assert c.sock.selected_alpn_protocol() == "larder/1" and c.sock.version() == "TLSv1.3"
        store_ids.add(c.hello["store_id"])
        status = json.loads(c.call("status")["json"])
        assert status.pop("feeds") == [] # the only list
        assert status and not any(isinstance(value, (dict, list)) for value in status.values())
    assert len(store_ids) == 1 and any(store_ids.pop())


def test_a_checkpoint_of_two_ranks(writer, connect):
    a, b = writer(), writer()
    run, attempt = Run(a, "two ranks"), os.urandom(16)
    assert Run(b, "two ranks").dek == run.dek
    assert [c.call("attempt", run_id=run.id, attempt=attempt, world=2)["number"] for c in (a, b)] == [1, 1]
    parts = [Part(run, attempt, 100, rank, 2, [os.urandom(9000), None, os.urandom(100)]) for rank in range(2)]
    for c, p in zip((a, b), parts):
        p.send(c)
        assert p.create(c)["sealed"] == 1 # as after a lost answer
        c.call("segment_seal", segment=p.id, trailer=p.trailer)
        assert c.refused("segment_chunk", p.stored[0], segment=p.id, number=0, entry=p.entries[0])[0] == "invalid"
    sequence = commit([a, b], parts)
    assert a.end(parts[0].join(a), "join")["sequence"] == sequence

    r = connect("reader")
    got = r.call("commit_get", kind=1, name="two ranks", select=1)
    assert (got["state"], got["pinned"]) == (1, 0)
    c = Cursor(got["record"][40:])
    assert (c.get("II"), c.take(16), c.take(16)) == ((1, 2), run.id, attempt)
    assert c.get("QQQQ") == (1, 100, sequence, sum(len(x) for p in parts for x in p.plains))
    listed = items("commit_item", r.call("commit_list", kind=1, name="two ranks")["items"])
    assert [(i["step"], i["sequence"], i["parts"]) for i in listed] == [(100, sequence, 2)]
    for p in parts:
        whole = read(r, run, [(p.id, 0, p.bytes)], 5000)
        header, chunks, _, private = segment_read(whole, run.envelope, client_kek(a)[1])
        assert chunks == p.plains and header["rank"] == p.rank
        assert private_read(private, chunks)[0]["layer.0"] == (1, [(2, p.rank, 1), (9000, 0, 9000)], p.plains[0])
    pieces = [(parts[1].id, 4096, 10), (parts[0].id, 0, 16), (parts[1].id, 4090, 1)]
    assert read(r, run, pieces, 1 << 40) == parts[1].stored[0][:10] + parts[0].header[:16] + b"\0"
    assert r.refused("read", source=1, scope=run.id, credit=1, count=1, **{"class": 1},
                     ranges=encode("read_range", object=os.urandom(16), offset=0, bytes=1))[0] == "not found"
    items_found = r.refused("scrub", kind=1, name="two ranks", level=2)
    assert items_found[0] == "denied"
    o = connect("operator")
    id, found, more = o.begin("scrub", kind=1, name="two ranks", level=2), [], True
    while more:
        payload, more = o.next(id)
        if payload:
            found.append(decode("scrub_item", Cursor(payload)))
    assert sorted((f["rank"], f["class"]) for f in found) == [(0, 0), (1, 0)]


def test_an_upload_goes_on_after_a_lost_connection(writer):
    c = writer()
    run, attempt = Run(c, "interrupted"), os.urandom(16)
    c.call("attempt", run_id=run.id, attempt=attempt, world=1)
    p = Part(run, attempt, 1, 0, 1, [os.urandom(5000) for _ in range(4)])
    assert p.create(c) == {"sealed": 0, "chunks_received": b""}
    for i in (3, 1):
        p.chunk(c, i)
    damaged = bytearray(p.stored[0])
    damaged[77] ^= 1
    assert c.refused("segment_chunk", bytes(damaged), segment=p.id, number=0, entry=p.entries[0])[0] == "corrupt"
    other = p.entries[0][:24] + xxh128(bytes(damaged))
    assert c.refused("segment_seal", segment=p.id, trailer=p.trailer)[0] == "invalid"
    c.sock.shutdown(socket.SHUT_RDWR)

    c = writer()
    received = p.create(c)["chunks_received"]
    assert sorted(struct.unpack(f"<{len(received) // 4}I", received)) == [1, 3]
    p.chunk(c, 0)
    assert c.refused("segment_chunk", bytes(damaged), segment=p.id, number=0, entry=other)[0] == "exists"
    p.send(c)
    assert commit([c], [p]) == 1


def test_a_newer_attempt_fences_the_older(writer):
    c = writer()
    run, old, new = Run(c, "fenced"), os.urandom(16), os.urandom(16)
    c.call("attempt", run_id=run.id, attempt=old, world=2)
    waiting = Part(run, old, 5, 0, 2, [b"first"])
    waiting.send(c)
    join = waiting.join(c)
    assert c.call("attempt", run_id=run.id, attempt=new, world=1)["number"] == 2
    with pytest.raises(Refused, match="fenced"):
        c.next(join)
    late = Part(run, old, 6, 0, 2, [b"late"])
    assert c.refused("segment_create", run_id=run.id, chunks=1, reserve_bytes=late.bytes, header=late.header)[0] == "fenced"
    assert c.refused("attempt", run_id=run.id, attempt=old, world=2)[0] == "fenced"


def test_a_missing_rank_is_named_and_the_step_saved_again(writer):
    c = writer()
    run, attempt = Run(c, "late"), os.urandom(16)
    c.call("attempt", run_id=run.id, attempt=attempt, world=2)
    part = Part(run, attempt, 8, 0, 2, [b"mine"])
    part.send(c)
    with pytest.raises(Refused, match=r"timeout: .*rank 1 of 2 has not joined"):
        c.next(part.join(c, wait_ms=200))
    other = Part(run, attempt, 8, 1, 2, [b"yours"])
    assert c.refused("segment_create", run_id=run.id, chunks=1, reserve_bytes=other.bytes, header=other.header)[0] == "timeout"
    b = writer()
    parts = [Part(run, attempt, 8, rank, 2, [b"again"]) for rank in range(2)]
    for p, client in zip(parts, (c, b)):
        p.send(client)
    assert commit([c, b], parts) == 1


def test_a_cancelled_join_has_joined(writer):
    a, b = writer(), writer()
    run, attempt = Run(a, "cancelled"), os.urandom(16)
    a.call("attempt", run_id=run.id, attempt=attempt, world=2)
    parts = [Part(run, attempt, 3, rank, 2, [b"part"]) for rank in range(2)]
    for p, c in zip(parts, (a, b)):
        p.send(c)
    first = parts[0].join(a)
    a.send(OPCODES["cancel"], encode("cancel", request_id=first), first)
    with pytest.raises(Refused, match="cancelled"):
        a.next(first)
    a.send(OPCODES["cancel"], encode("cancel", request_id=first), first) # again, for nothing
    a.call("ping")
    second = parts[1].join(b)
    asked = b.end(second, "join") # only b waits, so b is asked: rank 0 counts as joined
    assert asked["state"] == 2
    verdict = b.call("commit", run_id=run.id, step=3, attempt=attempt, world=2, verdict=19, text="they differ")
    assert verdict["sequence"] == 0
    with pytest.raises(Refused, match="mismatch: .*they differ"):
        a.next(parts[0].join(a))


def test_prune_does_the_plan_that_was_shown(writer, connect):
    c, o = writer(), connect("operator")
    run, attempt = Run(c, "pruned"), os.urandom(16)
    c.call("attempt", run_id=run.id, attempt=attempt, world=1)
    for step in range(1, 5):
        p = Part(run, attempt, step, 0, 1, [b"step %d" % step])
        p.send(c)
        assert commit([c], [p]) == step
    assert c.refused("prune", kind=1, name="pruned", keep_last=1)[0] == "denied"
    assert o.refused("prune", kind=1, name="pruned")[0] == "invalid"
    o.call("mark", kind=1, name="pruned", sequence=1, action=1, reason="the paper")
    plan = o.call("prune", kind=1, name="pruned", keep_last=1)
    assert [(i["step"], i["reason"]) for i in items("prune_item", plan["items"])] == [(1, 4), (2, 16), (3, 16), (4, 1)]
    c.call("mark", kind=1, name="pruned", sequence=4, action=3, reason="damaged")
    assert o.refused("prune", kind=1, name="pruned", keep_last=1, execute=1, plan=plan["plan"])[0] == "mismatch"
    plan = o.call("prune", kind=1, name="pruned", keep_last=1)
    done = o.call("prune", kind=1, name="pruned", keep_last=1, execute=1, plan=plan["plan"])
    assert [i["step"] for i in items("prune_item", done["items"]) if i["removed"]] == [2]
    listed = items("commit_item", o.call("commit_list", kind=1, name="pruned")["items"])
    assert [(i["step"], i["state"], i["pinned"]) for i in listed] == [(1, 1, 1), (3, 1, 0), (4, 2, 0)]


def test_roles_are_kept(writer, connect):
    Run(writer(), "roles")
    for role, name, fields in (
            ("reader", "run_open", dict(kind=1, name="new", create=1, run_id=os.urandom(16))),
            ("reader", "attempt", dict(run_id=os.urandom(16), attempt=os.urandom(16), world=1)),
            ("reader", "tenant_list", {}),
            ("writer", "run_destroy", dict(kind=1, name="roles")),
            ("writer", "mark", dict(kind=1, name="roles", sequence=1, action=1)),
            ("operator", "segment_discard", dict(segment=os.urandom(16))),
            ("operator", "tenant_add", dict(name="other"))):
        kind, text = connect(role).refused(name, **fields)
        assert kind == "denied" and role in text, (role, name, kind, text)
    assert connect("reader").refused("run_open", kind=1, name="absent")[0] == "not found"


def ends(c, kind, words):
    """The session ends: with an error frame that says why, then a close."""
    with pytest.raises(Refused) as caught:
        opcode, flags, _, payload = c.frame()
        assert flags & ERROR
        raise Refused(payload)
    assert caught.value.kind == kind and words in caught.value.error["text"], str(caught.value)
    with pytest.raises(Closed):
        c.frame()


@pytest.mark.parametrize("frame,kind,words", [
    (dict(magic=0x31445250), "protocol", "magic"), (dict(version=2), "version", "version 2"), (dict(flags=8), "protocol", "flags"),
    (dict(flags=1), "protocol", "flags"), (dict(reserved=1), "protocol", "reserved"), (dict(length=5 << 20), "protocol", "5242880")])
def test_broken_frames_end_the_session_with_a_sentence(connect, frame, kind, words):
    c = connect("reader")
    c.send(OPCODES["ping"], id=9, **frame)
    ends(c, kind, words)


def test_hello_comes_first_and_once(connect):
    c = connect("reader", hello=False)
    c.send(OPCODES["ping"], id=1)
    ends(c, "protocol", "hello")
    c = connect("reader")
    c.send(OPCODES["hello"], encode("hello", features=1), id=2)
    ends(c, "protocol", "hello")
    c = connect("reader", hello=False)
    c.send(OPCODES["hello"], encode("hello", features=1 | 1 << 31 | 1 << 41 | 1 << 50), id=1)
    ends(c, "version", "41")
    c = connect("reader", hello=False)
    assert c.call("hello", features=1 | 1 << 20)["features"] == 1 # what is not mandatory is left out


def test_what_is_only_refused_leaves_the_session_usable(connect):
    c = connect("reader")
    c.send(900, b"whatever", id=50)
    c.kept[50] = []
    with pytest.raises(Refused, match="unsupported"):
        c.next(50)
    assert c.refused("run_open", b"trailing", kind=1, name="x")[0] == "protocol"
    for name in ("ping", "status"):
        assert c.refused(name, b"trailing")[0] == "limit"
    c.kept[51] = []
    c.send(OPCODES["run_open"], encode("run_open", kind=1, name="x")[:-3], id=51)
    with pytest.raises(Refused, match="protocol"):
        c.next(51)
    c.call("ping")


def test_who_is_not_let_in(server, connect):
    def turned_away(**options):
        with pytest.raises((ssl.SSLError, Closed, ConnectionError)) as caught:
            connect("reader", **options)
        return str(caught.value).lower().replace("_", " ")
    assert "certificate required" in turned_away(certificate=False)
    assert "application protocol" in turned_away(alpn=("h2",))
    assert "application protocol" in turned_away(alpn=())
    assert "version" in turned_away(version=ssl.TLSVersion.TLSv1_2)
    host, port = server.credentials["reader"]["server"].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.shutdown(socket.SHUT_WR)
        assert plain.recv(100) == b""


def test_feed_reports(server):
    """What feeds report is in the status of their tenant until they end, or their session does."""
    c, other = Client(server, "reader", features=1 | 1 << 2 | 1 << 3), Client(server, "operator")
    assert c.hello["features"] == 1 | 1 << 2 | 1 << 3

    def report(i=1, **more):
        fields = dict(feed=bytes([i] * 16), ended=0, dataset="texts", run="llm", rank=1, world=4, epoch=2, position=96, samples=960,
                      bytes=12345, damaged=1, batches_ready=3, ready_bytes=777, in_flight_bytes=888, age_ms=10000, network_ms=100,
                      disk_ms=50, decode_ms=20, full_ms=9000, path="by hand")
        return dict(fields, **more)

    def feeds():
        return json.loads(other.call("status")["json"])["feeds"]

    assert feeds() == []
    c.call("feed_report", **report())
    c.call("feed_report", **report(age_ms=15000, network_ms=2100, disk_ms=1050, full_ms=9000))
    got, = feeds()
    want = dict(tenant="dev", dataset="texts", run="llm", rank=1, world=4, epoch=2, position=96, samples=960, bytes=12345, damaged=1,
                batches_ready=3, ready_bytes=777, in_flight_bytes=888, age_ms=15000, network_ms=2100, disk_ms=1050, decode_ms=20,
                full_ms=9000, recent_ms=5000, recent_network_ms=2000, recent_disk_ms=1000, recent_decode_ms=0, recent_full_ms=0,
                path="by hand")
    assert {k: got[k] for k in want} == want and got["reported_ms_ago"] < 60000
    assert c.refused("feed_report", **report(rank=4))[0] == "invalid"
    assert c.refused("feed_report", **report(2, dataset="x" * 256))[0] == "invalid"
    assert c.refused("feed_report", **report(2, path="x" * 128))[0] == "invalid"
    for i in range(2, 65):
        c.call("feed_report", **report(i))
    assert c.refused("feed_report", **report(65))[0] == "limit" and len(feeds()) == 64
    c.call("feed_report", **report(1, ended=1))
    c.call("feed_report", **report(99, ended=1)) # never heard of
    assert len(feeds()) == 63 and json.loads(other.call("status")["json"])["feeds_open"] == 63
    c.close()
    until = time.monotonic() + PATIENCE_S
    while feeds():
        assert time.monotonic() < until
    assert json.loads(other.call("status")["json"])["feeds_open"] == 0


def test_scans(writer, connect):
    """Who restores is told where others read the run's segments; of no other run."""
    c = writer(features=1 | 1 << 4)
    assert c.hello["features"] == 1 | 1 << 4
    run, attempt = Run(c, "scanned"), os.urandom(16)
    other = Run(c, "not scanned")
    c.call("attempt", run_id=run.id, attempt=attempt, world=1)
    part = Part(run, attempt, 1, 0, 1, [os.urandom(3 << 20), os.urandom(2 << 20)])
    part.send(c)
    assert c.call("read_scans", scope=run.id, joins=1) == dict(count=0, ranges=b"")
    r, at = connect("reader"), 2 << 20
    assert len(read(r, run, [(part.id, at, 1000)], 1000)) == 1000 # no scan
    assert c.call("read_scans", scope=run.id, joins=1) == dict(count=0, ranges=b"")
    at += 1 << 20
    assert read(r, run, [(part.id, at, 1000)], 1000, kind=1 | 64) == b"".join([part.header, *part.stored])[at:at + 1000]
    told = r.call("read_scans", scope=run.id, joins=1)
    scan, = items("read_range", told["ranges"])
    assert told["count"] == 1 and scan["object"] == part.id and scan["offset"] <= at
    assert at + 1000 <= scan["offset"] + scan["bytes"] <= 5 << 20
    assert c.call("read_scans", scope=run.id) == told
    for nobody in (other.id, os.urandom(16), bytes(16)):
        assert r.call("read_scans", scope=nobody) == dict(count=0, ranges=b"")
    assert r.refused("read_scans", b"x", scope=run.id)[0] == "corrupt"
    assert r.refused("read_scans", scope=run.id, joins=2)[0] == "invalid"
