"""What the whole pipeline keeps to: it imports without an engine,
logs no payload, and memory stays flat under attack."""

from __future__ import annotations

import base64
import subprocess
import sys

PROLOGUE = """
import asyncio, base64, io, logging, os, resource, struct, sys, zlib
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "nixl", "tensorrt_llm", "av", "safetensors"):
            raise ImportError(f"{name} is blocked by the test")
sys.meta_path.insert(0, Blocked())
from dynamo.trtllm.config import MediaConfig
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal import cache, embedding_files, tensor_pickle
from dynamo.trtllm.multimodal.blocking import run_blocking
from dynamo.trtllm.multimodal.decode import decode_image
from dynamo.trtllm.multimodal.fetch import Fetcher
from dynamo.trtllm.multimodal.parts import MediaPart, classify
import dynamo.trtllm.embeddings
"""

ATTACK = """
def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
rows = zlib.compress(bytes(19001) * 19000, 9)
header = chunk(b"IHDR", struct.pack(">IIBBBBB", 19000, 19000, 8, 0, 0, 0, 0))
bomb = b"\\x89PNG\\r\\n\\x1a\\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
del rows
async def refuse():
    try:
        await run_blocking(decode_image, bomb, MediaConfig())
    except ClientFault as fault:
        return fault.message
async def attack():
    return await asyncio.gather(*(refuse() for _ in range(64)))
asyncio.run(refuse())
before = int(open("/proc/self/statm").read().split()[1])
words = set(asyncio.run(attack()))
after = int(open("/proc/self/statm").read().split()[1])
print(len(bomb) < 500_000, words, (after - before) * resource.getpagesize() < 32 << 20)
"""


def run_in_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROLOGUE + code], capture_output=True, text=True, check=True, timeout=120
    )


def test_the_pipeline_imports_and_decodes_without_torch_nixl_and_engines() -> None:
    assert run_in_process("print('imported')").stdout == "imported\n"


def test_sixty_four_bombs_at_once_are_refused_from_their_headers_and_memory_stays_flat() -> None:
    words = "{\"19000 x 19000 pixels exceed this worker's limit of 64 million pixels\"}"
    assert run_in_process(ATTACK).stdout == f"True {words} True\n"


def test_a_large_broken_data_url_reaches_neither_log_nor_message() -> None:
    code = """
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
async def main():
    part = MediaPart(1, "image", "data:image/png;base64," + "SECRET" * 1_500_000 + "!")
    fetcher = Fetcher(MediaConfig())
    try:
        await fetcher.fetch_all([(part, classify(part, MediaConfig()))])
    except ClientFault as fault:
        print(fault.message, repr(part))
    await fetcher.close()
asyncio.run(main())
"""
    out = run_in_process(code)
    assert (
        "image 1: its data URL is not valid base64 MediaPart(position=1, kind='image', uuid=None, options={})"
        in out.stdout
    )
    assert "SECRET" not in out.stdout + out.stderr
    assert len(out.stdout + out.stderr) < 2000


def test_a_data_url_is_refused_by_its_length_before_it_is_decoded() -> None:
    payload = base64.b64encode(bytes(3 << 20)).decode()
    code = f"""
part = MediaPart(1, "image", "data:image/png;base64," + {payload[:4]!r} * {len(payload) // 4})
async def main():
    fetcher = Fetcher(MediaConfig(max_file_bytes=2 << 20))
    try:
        await fetcher.fetch_all([(part, classify(part, MediaConfig()))])
    except ClientFault as fault:
        print(fault.message)
    await fetcher.close()
asyncio.run(main())
"""
    assert run_in_process(code).stdout == "image 1: larger than this worker's limit of 2 MiB\n"
