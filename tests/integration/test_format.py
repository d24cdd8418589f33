# SPDX-License-Identifier: Apache-2.0
"""Goal: FORMAT.md is complete. Method: a second reader, written from that document and sharing no code with format/,
opens the golden files down to the last tensor. Hashes, cipher and zstd come from the same libraries by ctypes."""
import ctypes
import hashlib
import hmac
import pathlib
import struct

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
MASK = (1 << 64) - 1

xxhash = ctypes.CDLL("libxxhash.so.0")
crypto = ctypes.CDLL("libcrypto.so.3")
zstd = ctypes.CDLL("libzstd.so.1")


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


xxhash.XXH3_64bits.restype = ctypes.c_uint64
xxhash.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
xxhash.XXH3_128bits.restype = Hash128
xxhash.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
zstd.ZSTD_decompress.restype = ctypes.c_size_t
crypto.EVP_CIPHER_CTX_new.restype = ctypes.c_void_p
crypto.EVP_aes_256_gcm.restype = ctypes.c_void_p
for name in ("EVP_DecryptInit_ex", "EVP_DecryptUpdate", "EVP_CIPHER_CTX_ctrl", "EVP_DecryptFinal_ex", "EVP_CIPHER_CTX_free"):
    getattr(crypto, name).argtypes = None


def xxh64(data):
    return xxhash.XXH3_64bits(data, len(data))


def xxh128(data):
    h = xxhash.XXH3_128bits(data, len(data))
    return struct.pack(">QQ", h.high, h.low)


def hkdf(key, salt, info, n):
    prk = hmac.new(salt, key, hashlib.sha256).digest()
    out, block = b"", b""
    for i in range(1, n // 32 + 2):
        block = hmac.new(prk, block + info + bytes([i]), hashlib.sha256).digest()
        out += block
    return out[:n]


def gcm_open(key, nonce, ad, stored):
    p = ctypes.c_void_p
    body, tag = stored[:-16], stored[-16:]
    ctx = p(crypto.EVP_CIPHER_CTX_new())
    out, n = ctypes.create_string_buffer(len(body) + 16), ctypes.c_int()
    assert crypto.EVP_DecryptInit_ex(ctx, p(crypto.EVP_aes_256_gcm()), None, key, nonce) == 1
    assert crypto.EVP_DecryptUpdate(ctx, None, ctypes.byref(n), ad, len(ad)) == 1
    if body:
        assert crypto.EVP_DecryptUpdate(ctx, out, ctypes.byref(n), body, len(body)) == 1
    assert crypto.EVP_CIPHER_CTX_ctrl(ctx, 0x11, 16, tag) == 1
    assert crypto.EVP_DecryptFinal_ex(ctx, ctypes.create_string_buffer(16), ctypes.byref(n)) == 1, "tag"
    crypto.EVP_CIPHER_CTX_free(ctx)
    return out.raw[:len(body)]


def unzstd(frame, n):
    out = ctypes.create_string_buffer(n)
    assert zstd.ZSTD_decompress(out, ctypes.c_size_t(n), frame, ctypes.c_size_t(len(frame))) == n
    return out.raw


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        assert self.at + n <= len(self.data)
        self.at += n
        return self.data[self.at - n:self.at]

    def get(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def one(self, form):
        return self.get(form)[0]

    def bytes16(self):
        return self.take(self.one("H"))

    def end(self):
        assert self.at == len(self.data)


BITS = {1: 8, 2: 8, 3: 16, 4: 16, 5: 32, 6: 32, 7: 64, 8: 64, 9: 16, 10: 16, 11: 32, 12: 64, 13: 8, 14: 8, 15: 8, 16: 8,
        17: 8, 18: 8, 19: 64, 20: 128, 21: 4, 22: 6, 23: 6}
FLOATS = {9, 10, 11, 12, 14, 15, 17, 18, 19, 20}


def header_read(block):
    assert block[8:16] == b"LARDSEGM" and struct.unpack_from("<II", block, 16) == (1, 1)
    assert struct.unpack_from("<Q", block)[0] == xxh64(block[8:])
    assert not any(block[232:])
    step, rank, world = struct.unpack_from("<QII", block, 72)
    return dict(segment=block[24:40], run=block[40:56], attempt=block[56:72], step=step, rank=rank, world=world,
                salt=block[88:120], dek_id=block[120:136], commitment=block[136:168], tenant=block[168:232].rstrip(b"\0"))


def trailer_read(block):
    assert block[8:16] == b"LARDTRLR" and struct.unpack_from("<I", block, 16)[0] == 1
    assert struct.unpack_from("<Q", block)[0] == xxh64(block[8:])
    assert not any(block[120:])
    chunks, = struct.unpack_from("<I", block, 20)
    file_bytes, offset, index, public = struct.unpack_from("<QQQQ", block, 40)
    return dict(chunks=chunks, segment=block[24:40], file_bytes=file_bytes, offset=offset, index=index, public=public,
                digest=block[72:104], tag=block[104:120])


def envelope_open(e, kek):
    assert len(e) == 256 and e[8:16] == b"LARDENVL" and struct.unpack_from("<Q", e)[0] == xxh64(e[8:])
    label = b"larder/1 envelope"
    info = struct.pack("<H", len(label)) + label + e[16:28] + e[32:48] + e[64:128]
    okm = hkdf(kek, e[128:160], info, 64)
    assert okm[32:] == e[160:192]
    return gcm_open(okm[:32], bytes(12), e[8:192], e[192:240])


class Seal:
    def __init__(self, h, dek):
        label = b"larder/1 segment"
        info = (struct.pack("<H", len(label)) + label + struct.pack("<IIH", 1, 1, len(h["tenant"])) + h["tenant"] + h["run"] +
                struct.pack("<Q", h["step"]) + h["attempt"] + struct.pack("<II", h["rank"], h["world"]) + h["segment"] + h["dek_id"])
        okm = hkdf(dek, h["salt"], info, 64)
        assert okm[32:] == h["commitment"]
        self.key = okm[:32]
        self.context = (struct.pack("<IIIIIQ", 1, 1, h["rank"], h["world"], 0, h["step"]) + h["run"] + h["attempt"] +
                        h["segment"] + h["dek_id"] + h["tenant"].ljust(64, b"\0"))

    def open(self, domain, counter, own, stored):
        ad = struct.pack("<I", domain) + self.context + own
        assert len(ad) == 160 + len(own)
        return gcm_open(self.key, struct.pack("<IQ", domain, counter), ad, stored)


def planes_decode(payload, dtype, n):
    width = {19: 4, 20: 8}.get(dtype, max(BITS[dtype] // 8, 1))
    m, c = n // width, Cursor(payload)
    assert c.get("BB") == (1, width)
    heads = []
    for _ in range(width):
        kind = c.one("B")
        heads.append((kind, None if kind == 0 else c.one("B") if kind == 1 else
                      [c.get("BB") for _ in range(c.one("B"))] if kind == 2 else c.one("I")))
    planes = [c.take(m) if kind == 0 else None for kind, _ in heads]
    for i, (kind, what) in enumerate(heads):
        if kind == 1:
            planes[i] = bytes([what]) * m
        elif kind == 2:
            planes[i] = tiers_decode(c, what, m)
        elif kind == 3:
            planes[i] = unzstd(c.take(what), m)
    c.end()
    out = bytearray()
    for parts in zip(*planes):
        v = int.from_bytes(bytes(parts), "big")
        if dtype in FLOATS:
            v = v >> 1 | (v & 1) << (8 * width - 1)
        out += v.to_bytes(width, "little")
    return bytes(out)


def tiers_decode(c, tiers, m):
    codes, left = [], m
    for k, _ in tiers:
        tier = []
        for at in range(0, left, 64):
            masks = c.get(f"{k}Q")
            tier += [sum((masks[b] >> j & 1) << b for b in range(k)) for j in range(min(64, left - at))]
        codes.append(tier)
        left = sum(code == (1 << k) - 1 for code in tier)
    values = c.take(left)
    for (k, base), tier in zip(reversed(tiers), reversed(codes)):
        rest = iter(values)
        values = bytes(next(rest) if code == (1 << k) - 1 else (code + base) & 255 for code in tier)
    return values


def decode(codec, dtype, payload, n):
    if codec == 0:
        return payload
    if codec == 1:
        return bytes(n)
    if codec == 2:
        return payload * (n // len(payload))
    return unzstd(payload, n) if codec == 3 else planes_decode(payload, dtype, n)


def segment_read(data, envelope, kek):
    t, h = trailer_read(data[-4096:]), header_read(data[:4096])
    assert t["file_bytes"] == len(data) and t["segment"] == h["segment"]
    assert (t["offset"] + t["index"] + 4095) // 4096 * 4096 + 4096 == len(data)
    seal = Seal(h, envelope_open(envelope, kek))
    seal.open(3, 0, struct.pack("<I", 1) + t["segment"] + struct.pack("<QQQQI", t["file_bytes"], t["offset"], t["index"],
              t["public"], t["chunks"]) + t["digest"] + bytes(8), t["tag"])
    index = data[t["offset"]:t["offset"] + t["index"]]
    assert hashlib.sha256(index).digest() == t["digest"]
    public, sealed = index[:t["public"]], index[t["public"]:]
    assert struct.unpack_from("<Q", public)[0] == xxh64(public[8:]) and public[8:16] == b"LARDINDX"
    assert struct.unpack_from("<IIQ", public, 16) == (1, t["chunks"], 0)
    private = seal.open(2, 0, hashlib.sha256(public).digest(), sealed)
    chunks, codecs = [], []
    for i in range(t["chunks"]):
        offset, stored_n, plain_n, codec, dtype = struct.unpack_from("<QIIBB", public, 32 + 40 * i)
        stored = data[offset:offset + stored_n]
        own = struct.pack("<IIIBBH", i, i + 1 == t["chunks"], plain_n, codec, dtype, 0)
        assert public[56 + 40 * i:72 + 40 * i] == (xxh128(stored) if stored_n else bytes(16))
        payload = seal.open(1, i, own, stored) if stored_n else b""
        chunks.append(decode(codec, dtype, payload, plain_n))
        codecs.append(codec)
    return h, chunks, codecs, private


def private_read(private, chunks):
    c = Cursor(private)
    version, chunk_n, tensor_n, alias_n, blob_n, zero = c.get("6I")
    assert (version, chunk_n, zero) == (1, len(chunks), 0)
    for chunk in chunks:
        assert c.take(16) == xxh128(chunk)
    tensors, names = {}, []
    for _ in range(tensor_n):
        name, dtype, form = c.bytes16().decode(), *c.get("BB")
        dims, number = form & 31, "Q" if form & 64 else "I"
        shape = c.get(number * dims)
        offsets, lengths = (c.get(number * dims), c.get(number * dims)) if form & 32 else ((0,) * dims, shape)
        assert bool(form & 32) == (lengths != shape or any(offsets))
        assert bool(form & 64) == any(x >> 32 for x in shape + offsets + lengths)
        box = list(zip(shape, offsets, lengths))
        first, offset, plain_hash = *c.get("II"), c.take(16) if form & 128 else None
        n = BITS[dtype]
        for _, _, length in box:
            n *= length
        n //= 8
        if n > 1 << 20:
            count = (n + (4 << 20) - 1) // (4 << 20)
            data = b"".join(chunks[first:first + count])
            assert offset == 0 and plain_hash is None
        else:
            data = chunks[first][offset:offset + n] if n else b""
            assert plain_hash == (xxh128(data) if n else None)
        assert len(data) == n
        tensors[name] = (dtype, box, data)
        names.append(name)
    aliases = {c.bytes16().decode(): names[c.one("I")] for _ in range(alias_n)}
    blobs = {}
    for _ in range(blob_n):
        name, (n, first, offset) = c.bytes16().decode(), c.get("QII")
        blobs[name] = chunks[first][offset:offset + n] if n else b""
    c.end()
    return tensors, aliases, blobs


def record_read(name, kind):
    data = (GOLDEN / "v1" / name).read_bytes()
    assert data[:16] == xxh128(data[16:]) and data[16:24] == b"LARDRECD"
    assert struct.unpack_from("<IIQ", data, 24) == (kind, 1, len(data) - 40)
    return Cursor(data[40:])


def test_segment_of_version_1():
    h, chunks, codecs, private = segment_read((GOLDEN / "v1/segment").read_bytes(), (GOLDEN / "v1/envelope").read_bytes(),
                                              bytes(range(0x20, 0x40)))
    assert codecs == [3, 4, 1, 2, 0, 4, 4, 1, 1]
    assert (h["step"], h["rank"], h["world"], h["tenant"]) == (9000, 1, 2, b"golden")
    tensors, aliases, blobs = private_read(private, chunks)
    assert tensors["ones"][2] == struct.pack("<f", 1.0) * 255 and tensors["scalar"][1] == []
    assert tensors["zeros"][2] == bytes(4096) and tensors["large"][2] == bytes((4 << 20) + 65536)
    assert tensors["model/embed"][1] == [(64, 16, 32), (96, 0, 96)] and tensors["empty"][1] == [(2, 0, 2), (0, 0, 0)]
    assert tensors["wide"] == (8, [(1 << 33, 1 << 32, 5), (4, 1, 3)], tensors["tokens"][2][128:248])
    assert all(token < 50257 for token in struct.unpack("<1024Q", tensors["tokens"][2]))
    assert aliases == {"model/head": "model/embed"} and blobs["notes.txt"].startswith(b"larder keeps what")
    assert blobs["nothing"] == b""


def test_records_of_version_1():
    c = record_read("commit", 5)
    kind, world, run, attempt = *c.get("II"), c.take(16), c.take(16)
    number, step, sequence, plain, time = c.get("5Q")
    assert (kind, world, number, step, sequence, plain, time) == (1, 2, 2, 9000, 4, 4329660, 1700000000123456789)
    assert run == bytes(range(0x20, 0x30)) and attempt == bytes(range(0x30, 0x40))
    for rank in range(world):
        assert c.get("II") == (rank, 0)
        assert c.take(16)[0] == 0x10 - rank and c.one("Q") == 65536 + 4096 * rank and c.take(32) == bytes([0xa0 + rank]) * 32
    assert (c.bytes16().decode(), c.bytes16()) == ("llama 7b é", b"\1position")
    labels = Cursor(c.bytes16())
    assert [labels.bytes16() for _ in range(4)] == [b"lr", b"1e-4", b"k", b""]
    c.end()
    c = record_read("tenant", 2)
    assert (c.bytes16(), *c.get("QI"), c.bytes16(), c.one("Q")) == (b"golden", 1 << 40, 2, b"eu", 1700000000123456789)
    c.end()
    c = record_read("attempt", 4)
    assert (c.take(16), c.take(16), *c.get("QIQ")) == (run, attempt, 2, 2, 1700000000123456789)
    c.end()
    c = record_read("pin", 6)
    assert (c.take(16), *c.get("IQ"), c.bytes16(), c.one("Q")) == (run, 1, 4, b"kept for the paper", 1700000000123456789)
    c.end()


def test_samples_of_version_1():
    shard, c = (GOLDEN / "v1/shard.tar").read_bytes(), record_read("samples", 7)
    kind, names_n, shard_bytes, record_bytes, count = c.get("IIQQQ")
    assert (kind, shard_bytes, record_bytes, count) == (1, len(shard), 0, 3)
    names = [c.bytes16().decode() for _ in range(names_n)]
    found = {}
    for _ in range(count):
        key = c.bytes16().decode()
        for _ in range(c.one("H")):
            name, offset, n = c.get("IQQ")
            found[key, names[name]] = shard[offset:offset + n]
    c.end()
    assert found == {("set/a", "v1.txt"): b"one", ("set/a", "cls"): b"7", ("set/b", "txt"): b"", ("c", "txt"): b"three"}


def test_samples_in_columns():
    """Three rows of MDS: what the index says lies where the shard itself says."""
    shard, c = (GOLDEN / "v1/shard.mds").read_bytes(), record_read("samples-mds", 7)
    assert c.get("IIQQQ") == (3, 2, len(shard), 0, 3)
    columns = [(c.bytes16().decode(), c.bytes16().decode(), c.one("Q")) for _ in range(2)]
    assert columns == [("id", "int32", 4), ("text", "str", MASK)]
    at = c.one("Q")
    count, *offsets = struct.unpack_from("<5I", shard)
    assert count == 3 and offsets[0] == at and offsets[3] == len(shard)
    for i in range(3):
        n = c.one("I")
        assert (at, n) == (offsets[i], 2 * i) and struct.unpack_from("<I", shard, at) == (n,)
        assert shard[at + 4:at + 8 + n] == struct.pack("<I", 100 + i) + b"a text"[:n]
        at += 8 + n
    c.end()


def test_samples_of_tokens():
    raw = (GOLDEN / "v1/tokens.idx").read_bytes()
    magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, code, sequences, borders) == (b"MMIDIDX\0\0", 1, 8, 4, 4)
    lengths = struct.unpack_from("<4i", raw, 34)
    starts = struct.unpack_from("<4q", raw, 50)
    documents = struct.unpack_from("<4q", raw, 82)
    assert [2 * sum(lengths[:i]) for i in range(4)] == list(starts) and len(raw) == 114
    c = record_read("samples-documents", 7)
    assert c.get("IIQQQ") == (4, 0, 2 * sum(lengths), 0, 3) and c.get("IIQQ") == (code, 0, 0, 0)
    assert [c.one("I") for _ in range(3)] == [sum(lengths[a:b]) for a, b in zip(documents, documents[1:])]
    c.end()
    c = record_read("samples-windows", 7)
    assert c.get("IIQQQ") == (4, 0, 2 * sum(lengths), 0, (sum(lengths) - 1) // 4) and c.get("IIQQ") == (code, 0, 4, 1)
    c.end()


def mix(x):
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & MASK
    x = (x ^ x >> 27) * 0x94d049bb133111eb & MASK
    return x ^ x >> 31


GOLDEN_RATIO = 0x9e3779b97f4a7c15


def permute(n, key, x):
    if n == 1:
        return 0
    h = next(h for h in range(4, 33) if n <= 1 << 2 * h)
    keys = [mix(key + (i + 1) * GOLDEN_RATIO & MASK) for i in range(8)]
    while True:
        left, right = x >> h, x & (1 << h) - 1
        for k in keys:
            left, right = right, left ^ mix(right ^ k) >> 64 - h
        x = left << h | right
        if x < n:
            return x


def order(counts, seed, window, position, substitute=None):
    epoch, x = divmod(position, sum(counts))

    def key(stream):
        return mix(mix(mix(seed + GOLDEN_RATIO & MASK) ^ epoch) + (stream + 1) * GOLDEN_RATIO & MASK)

    shards = range(len(counts))
    p = [permute(len(counts), key(0), j) for j in shards] if window else list(shards)
    b = [sum(counts[s] for s in p[:j]) for j in range(len(counts) + 1)]

    def place(at):
        return max(j for j in shards if b[j] <= at and counts[p[j]] > 0)

    if window or substitute is not None:
        w = place(x) // (window or 8)
        first, end = w * (window or 8), min((w + 1) * (window or 8), len(counts))
        stream = 1 + w
        if substitute is not None:
            stream, x = MASK - w, b[first] + (x - b[first] + 1 + substitute) % (b[end] - b[first])
        x = b[first] + permute(b[end] - b[first], key(stream), x - b[first])
    return p[place(x)], x - b[place(x)]


def mixed(weights, counts, seed, window, position):
    low, high, n, node = 0, len(weights), position, 1
    while high - low > 1:
        middle = low + (high - low) // 2
        left, both = sum(weights[low:middle]), sum(weights[low:high])
        shift = mix(mix(seed + GOLDEN_RATIO & MASK) + node * GOLDEN_RATIO & MASK) % both
        u, v = (n * left + shift) // both, ((n + 1) * left + shift) // both
        if v > u:
            n, high, node = u, middle, 2 * node
        else:
            n, low, node = n - u, middle, 2 * node + 1
    return low, *order(counts, mix(seed + (low + 1) * GOLDEN_RATIO & MASK), window, n)


def test_order_gives_the_values_of_the_document():
    assert [permute(10, 42, x) for x in range(10)] == [3, 7, 5, 0, 4, 8, 1, 9, 6, 2]
    assert permute(10**12, 7, 123456789) == 328071954450
    assert permute(MASK, 1, 0) == 4000726240098497997
    assert [order((3, 0, 5, 2), 2024, 2, i) for i in range(10)] == [
        (0, 1), (0, 0), (0, 2), (2, 0), (3, 0), (2, 1), (2, 2), (2, 4), (3, 1), (2, 3)]
    assert [order((3, 0, 5, 2), 2024, 2, 3, a) for a in range(4)] == [(2, 4), (2, 1), (3, 1), (3, 0)]
    assert [mixed((5, 3, 2), (3, 0, 5, 2), 2024, 2, i) for i in range(10)] == [
        (1, 3, 1), (0, 3, 0), (1, 0, 1), (0, 3, 1), (2, 2, 3), (0, 2, 4), (1, 0, 2), (0, 2, 2), (2, 3, 0), (0, 2, 0)]


def chunk_hash(data):
    lo = hi = 0
    k = [mix((i + 1) * GOLDEN_RATIO & MASK) for i in range(8)]
    padded = data + bytes(-len(data) % 32)
    for i in range(len(padded) // 32):
        w, g = struct.unpack_from("<4Q", padded, 32 * i), i * GOLDEN_RATIO
        p = (w[0] ^ k[0] + g & MASK) * (w[1] ^ k[1])
        q = (w[2] ^ k[2] + g & MASK) * (w[3] ^ k[3])
        x = (p & MASK ^ q >> 64) + w[0] + w[3] & MASK
        y = (p >> 64 ^ q & MASK) + w[1] + w[2] & MASK
        r = (x ^ k[4]) * (y ^ k[5])
        lo, hi = lo + (r & MASK) & MASK, hi + (r >> 64) & MASK
    lo = lo + mix(hi + len(data) & MASK) & MASK
    hi = hi + mix(lo + k[6] & MASK) & MASK
    lo = lo + mix(hi + k[7] & MASK) & MASK
    return lo, hi + mix(lo) & MASK


def test_chunk_hash_gives_the_values_of_the_document():
    assert chunk_hash(b"larder") == (0xc91975e7617ea679, 0x54445c426a177e15)
    assert chunk_hash(b"") == (0x5e1ded9ab2e75be3, 0xb488c540681815a1)


def test_scratch_file_of_version_1():
    data = (GOLDEN / "v1/scratch").read_bytes()
    checksum, magic, version, count, offset, n, table_hash = struct.unpack_from("<Q8sIIQQQ", data)
    assert (checksum, magic, version) == (xxh64(data[8:4096]), b"LARDSCRA", 1) and not any(data[48:4096])
    assert len(data) == offset + n and table_hash == xxh64(data[offset:])
    c, place, found = Cursor(data[offset:]), 4096, {}
    for _ in range(count):
        name, dtype, dims = c.bytes16().decode(), *c.get("BB")
        box = [c.get("QQQ") for _ in range(dims)]
        size = BITS[dtype] // 8
        for _, _, length in box:
            size *= length
        found[name] = (dtype, box, data[place:place + size])
        for at in range(0, size, 4 << 20):
            assert c.get("QQ") == chunk_hash(data[place + at:place + min(at + (4 << 20), size)])
        place += -(-size // 4096) * 4096
    c.end()
    assert place == offset
    assert found == {"a/b": (1, [(37, 0, 37)], b"six words of bf16 and a tail\0\1\2" + bytes(6)),
                     "none": (11, [(3, 0, 3), (0, 0, 0)], b""), "box": (12, [(9, 5, 3)], b"of a box, eight bytes ea")}
