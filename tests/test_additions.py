"""What has to be touched to add something: each test adds one,
in a process of its own, and looks at all it must lead to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm import config

ADD_FLAGS = """
import json, os
from dataclasses import dataclass
from dynamo.trtllm import config, engine_flags
from dynamo.trtllm.flag import Flag, flag
from dynamo.trtllm.roles import Role
from dynamo.trtllm.values import COUNT, SECONDS

@dataclass(frozen=True, kw_only=True)
class MediaConfig(config.MediaConfig):
    max_rows: int = flag(
        "--max-rows", COUNT, 7, "Most rows of a table.", roles=frozenset({Role.PREFILL}), shared="MAX_ROWS"
    )

config.MediaConfig = MediaConfig
engine_flags.ENGINE_FLAGS += (
    Flag("--tile-size", COUNT, None, "Size of a tile.", argument="tile_config.size"),
)

from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.preflight.faults import find_faults
from dynamo.trtllm.utils.command_line import build_parser
from dynamo.trtllm.utils.flag_table import flag_table
from dynamo.trtllm.utils.trtllm_utils import parse

PREFILL = ["--disaggregation-mode", "prefill", "--model-path", "demo"]

def outcome(*arguments, **variables):
    os.environ.update(variables)
    try:
        found = parse([*PREFILL, *arguments])
    except StartupError as error:
        return error.message
    finally:
        for name in variables:
            del os.environ[name]
    return [found.config.media.max_rows, found.config.engine.args.get("tile_config"), list(found.notes)]

print(json.dumps({
    "default": outcome(),
    "flag": outcome("--modality", "multimodal", "--max-rows", "3", "--tile-size", "2"),
    "variable": outcome("--modality", "multimodal", DYN_TRTLLM_MAX_ROWS="4", DYN_TRTLLM_TILE_SIZE="5"),
    "shared variable": outcome("--modality", "multimodal", MAX_ROWS="6"),
    "flag over variable": outcome(
        "--modality", "multimodal", "--max-rows", "3", DYN_TRTLLM_MAX_ROWS="4", MAX_ROWS="6"
    ),
    "other role": outcome("--disaggregation-mode", "decode", "--max-rows", "3"),
    "bad flag": outcome("--max-rows", "0"),
    "bad variable": outcome(DYN_TRTLLM_TILE_SIZE="x"),
    "fault": [
        each
        for each in find_faults(parse([*PREFILL, "--trtllm.tile_config.size", "0"]).config)
        if "tile" in each
    ],
    "help": " ".join(build_parser().format_help().split()),
    "table": flag_table(),
}))
"""


@pytest.fixture(scope="module")
def added() -> dict[str, Any]:
    """What a process finds in which `config.py` declares one flag more of a layer,
    and `engine_flags.py` one more of an engine argument."""
    result = subprocess.run(
        [sys.executable, "-c", ADD_FLAGS], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_a_flag_is_its_declaration_and_its_consumer(added: dict[str, Any]) -> None:
    assert not hasattr(config.MediaConfig, "max_rows")
    assert added["default"] == [7, None, []]
    assert added["flag"] == [3, {"size": 2}, []]
    assert added["variable"] == [4, {"size": 5}, []]
    assert added["shared variable"] == [6, None, []]
    assert added["flag over variable"] == [3, None, []]


def test_a_declared_flag_brings_its_range_its_role_and_its_sentences(added: dict[str, Any]) -> None:
    assert added["other role"] == [7, None, ["a decode worker has no use for --max-rows, so it is ignored"]]
    assert added["bad flag"] == "--max-rows must be a whole number of at least 1, not '0'"
    assert added["bad variable"] == "DYN_TRTLLM_TILE_SIZE must be a whole number of at least 1, not 'x'"
    assert (
        "tile_config.size 0 (--trtllm.tile_config.size) must be a whole number of at least 1"
        in added["fault"]
    )


def test_a_declared_flag_stands_in_help_and_in_the_readmes_table(added: dict[str, Any]) -> None:
    assert (
        "--max-rows N Most rows of a table. env var: DYN_TRTLLM_MAX_ROWS, MAX_ROWS | default: 7"
        in added["help"]
    )
    assert "--tile-size N Size of a tile. env var: DYN_TRTLLM_TILE_SIZE" in added["help"]
    media = added["table"].partition("**Media**")[2].partition("**Transfer**")[0]
    assert "| `--max-rows N` | `MAX_ROWS` | 7 | prefill | Most rows of a table. |" in media.splitlines()
    engine = added["table"].partition("**Engine**")[2].partition("**Media**")[0]
    assert "| `--tile-size N` | | | | Size of a tile. |" in engine.splitlines()


POINT_CLOUDS = '''
"""Point clouds: text of three numbers a line."""

from dataclasses import dataclass

from dynamo.trtllm.core import DecodedMedia, MediaShape
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.multimodal.kinds.kind import MediaKind


@dataclass(frozen=True)
class DecodedPoints(DecodedMedia):
    kind = "points"
    rows: tuple

    @property
    def nbytes(self):
        return 24 * len(self.rows)


class PointsKind(MediaKind):
    name = "points"
    plural = "point clouds"
    part_type = "points_url"
    accept = "model/*"

    def rule(self, model, options, config):
        return options.get("most", model)

    def inspect(self, data, rule, config):
        if any(len(line.split()) != 3 for line in data.decode().splitlines()):
            raise ClientFault("a line of it is not three numbers")
        return MediaShape(self.name, (len(data.splitlines()),))

    async def decode(self, data, digest, shape, rule, config):
        lines = data.decode().splitlines()
        return DecodedPoints(digest, tuple(tuple(map(float, line.split())) for line in lines))
'''
KIND_IN_THE_PIPELINE = {
    "multimodal/kinds/points.py": lambda _: POINT_CLOUDS,
    "multimodal/kinds/registry.py": lambda text: text.replace(
        "    AudioKind(),\n", "    AudioKind(),\n    PointsKind(),\n"
    ).replace("\n_ALL", "\nfrom dynamo.trtllm.multimodal.kinds.points import PointsKind\n\n_ALL"),
}
"""Files below the package, and what each becomes."""
KIND_IN_AN_ENGINE_AND_IN_PROSE = (
    "engines/transformers/families.py",  # what the model's prompt writes for an item
    "engines/transformers/media.py",  # the encoder's name
    "engines/transformers/points.py",  # the encoder: from the item to features
    "README.md",  # a row of the table of modalities
)
ASK_ABOUT_POINTS = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from dynamo.trtllm.config import EngineConfig, EngineKind, MediaConfig, Modality
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.errors import ClientFault
from dynamo.trtllm.frontend.request import parse_request
from dynamo.trtllm.multimodal.loader import MediaLoader
from dynamo.trtllm.multimodal_processor import MultimodalProcessor

PNG = (
    "data:;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAA"
    "DUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
GOOD, OTHER, BAD = "data:,1 2 3", "data:,4 5 6", "data:,1 2"

class Asked:
    def id(self): return "r"
    def trace_headers(self): return None

async def prompt_of(placeholders, token_ids, **media):
    script = {"placeholder_ids": placeholders, "media_tokens": 2}
    engine = DoubleEngine(EngineConfig(kind=EngineKind.DOUBLE, double_script=script))
    info = await engine.start()
    processor = MultimodalProcessor(info, MediaLoader(engine, info, MediaConfig(), Modality.MULTIMODAL))
    try:
        data = {f"{kind}_url": [{"Url": url} for url in urls] for kind, urls in media.items()}
        raw = {"model": "m", "token_ids": token_ids, "multi_modal_data": data}
        prompt = (await processor.prepare(parse_request(raw, Asked()))).prompt
        return [list(prompt.token_ids), [each.item.kind for each in prompt.media]]
    except ClientFault as fault:
        return fault.message
    finally:
        await processor.close()

async def main():
    both = {"image": 9, "points": 6}
    return {
        "mixed": await prompt_of(both, [1, 6, 2, 9], image=[PNG], points=[GOOD]),
        "bad": await prompt_of(both, [1, 6], points=[BAD]),
        "two": await prompt_of(both, [1, 6, 6], points=[GOOD, OTHER]),
        "not taken": await prompt_of({"image": 9}, [1], points=[GOOD]),
        "unknown": await prompt_of(both, [1], smell=[GOOD]),
    }

print(json.dumps(asyncio.run(main())))
"""


def test_a_media_kind_is_at_most_six_files(tmp_path: Path) -> None:
    """A fourth kind, added to a copy of the package, goes the way of the others:
    from a part to its place in the prompt."""
    package = tmp_path / "dynamo" / "trtllm"
    shutil.copytree(
        Path(config.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "model")
    )
    for name, edited in KIND_IN_THE_PIPELINE.items():
        file = package / name
        before = file.read_text() if file.exists() else ""
        file.write_text(edited(before))
        assert file.read_text() != before
    asked = subprocess.run(
        [sys.executable, "-c", ASK_ABOUT_POINTS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert found["mixed"] == [[1, 6, 6, 2, 9, 9], ["points", "image"]]
    assert found["bad"] == "points 1: a line of it is not three numbers"
    assert found["two"] == "the request holds 2 point clouds; this worker takes at most 1"
    assert (
        found["not taken"]
        == "points 1: the model m takes no point clouds on this worker; it takes images only"
    )
    assert found["unknown"] == (
        "content parts of type smell_url are not supported; "
        "a content part is text, image_url, video_url, audio_url, input_audio or points_url"
    )
    assert len(KIND_IN_THE_PIPELINE) + len(KIND_IN_AN_ENGINE_AND_IN_PROSE) <= 6


class CopiedPackage:
    """A copy of the package, with a file more and a line more in a file that it has."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._package = directory / "dynamo" / "trtllm"
        ignored = shutil.ignore_patterns("__pycache__", "model")
        shutil.copytree(Path(config.__file__).parent, self._package, ignore=ignored)
        self.touched: list[str] = []

    def add_file(self, name: str, text: str) -> None:
        file = self._package / name
        assert not file.exists()
        file.write_text(text)
        self.touched.append(name)

    def add_line(self, name: str, after: str, line: str) -> None:
        """Put `line` behind the only line of the file that says `after`."""
        file = self._package / name
        lines = file.read_text().splitlines(keepends=True)
        (at,) = [number for number, each in enumerate(lines) if after in each]
        lines.insert(at + 1, line + "\n")
        file.write_text("".join(lines))
        self.touched.append(name)

    def ask(self, program: str) -> Any:
        """What `program`, run over the copy, prints last, as JSON."""
        program = f"import sys; sys.path.insert(0, {str(self._directory)!r})\n{program}"
        command = [sys.executable, "-c", program]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert asked.returncode == 0, asked.stderr
        return json.loads(asked.stdout.splitlines()[-1])


@pytest.fixture
def copied(tmp_path: Path) -> CopiedPackage:
    return CopiedPackage(tmp_path)


SHOW_THE_PARROTS = """
import asyncio, json
from prometheus_client import generate_latest
from dynamo.trtllm import metrics
from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.engines.double import DoubleEngine
from dynamo.trtllm.roles import Role
from dynamo.trtllm.service.metrics_page import MetricsPage

engine, shown = DoubleEngine(EngineConfig()), {}
for role in (Role.AGGREGATED, Role.ENCODE):
    page = MetricsPage(role)
    page.add(engine.stats)
    lines = generate_latest(page.registry).decode().splitlines()
    shown[role.value] = [line for line in lines if "parrot" in line]
print(json.dumps({**shown, "table": [row for row in metrics.table() if "parrot" in row]}))
"""


def test_a_metric_is_its_declaration_and_the_line_that_counts_it(copied: CopiedPackage) -> None:
    new = 'PARROTS = Counter("dynamo_trtllm_parrots_total", "parrots", "Parrots seen.", _CONTEXT)'
    copied.add_line("metrics.py", "MEDIA_CACHE_ENTRIES = Gauge(", new)
    copied.add_line(
        "engines/double.py", "metrics.ENGINE_ACTIVE: self._active,", "            metrics.PARROTS: 3,"
    )
    assert copied.ask(SHOW_THE_PARROTS) == {
        "agg": [
            "# HELP dynamo_trtllm_parrots_total Parrots seen.",
            "# TYPE dynamo_trtllm_parrots_total counter",
            "dynamo_trtllm_parrots_total 3.0",
        ],
        "encode": [],
        "table": ["| `dynamo_trtllm_parrots_total` | counter | parrots |  | agg, prefill | Parrots seen. |"],
    }
    assert copied.touched == ["metrics.py", "engines/double.py"]


def test_an_engine_is_a_file_and_a_line(copied: CopiedPackage) -> None:
    copied.add_file("engines/parrot.py", PARROT)
    copied.add_line("roles.py", 'DOUBLE = "double"', '    PARROT = "parrot", "parrot:ParrotEngine"')
    found = copied.ask(SERVE_BY_THE_PARROT)
    assert found["tokens"] == [7, 8, 9]
    assert found["named in help"] is True
    assert found["unknown"] == (
        "--engine must be tensorrt_llm, transformers, double or parrot, not 'budgerigar'"
    )
    assert len(copied.touched) == 2


def test_an_engine_whose_library_is_missing_says_what_its_line_says(copied: CopiedPackage) -> None:
    copied.add_file("engines/parrot.py", "import no_such_library\n")
    line = '    PARROT = "parrot", "parrot:ParrotEngine", "no_such_library", "parrots live elsewhere"'
    copied.add_line("roles.py", 'DOUBLE = "double"', line)
    assert copied.ask(START_THE_PARROT) == ["parrots live elsewhere", "parrots live elsewhere"]


def test_a_transfer_backend_is_a_file_and_a_line(copied: CopiedPackage) -> None:
    copied.add_file("transfer/pigeon.py", PIGEON)
    copied.add_line(
        "transfer/registry.py", '"local":', '    "pigeon": "dynamo.trtllm.transfer.pigeon:PigeonTransport",'
    )
    assert copied.ask(HAND_OVER_BY_PIGEON) == ["pigeon", [1.0, 2.0, 3.0], 0]
    assert len(copied.touched) == 2


def test_a_tensorrt_llm_release_is_a_file_and_a_line(copied: CopiedPackage, tmp_path: Path) -> None:
    """Its own record judges it: an argument that is new in it is taken,
    and everybody knows where that was read."""
    installed = tmp_path / "tensorrt_llm-1.5.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.5.0\n")
    before = copied.ask(JUDGE_THE_RELEASE)
    assert before["nearest"] == "1.4.0rc2"
    assert before["note"] is not None
    copied.add_file("engines/tensorrt_llm/record/releases/v1_5_0.py", NEW_RELEASE)
    copied.add_line("engines/tensorrt_llm/record/releases/__init__.py", '"v1_4_0rc2"', '    "v1_5_0",')
    after = copied.ask(JUDGE_THE_RELEASE)
    assert (after["nearest"], after["note"], after["untested"]) == ("1.5.0", None, [])
    assert len(after["faults"]) == 1
    assert "brand_newer" in after["faults"][0]
    assert after["source"] == "docs of 1.5.0"
    assert len(copied.touched) == 2


def test_a_model_family_of_the_portable_engine_is_a_row(copied: CopiedPackage, tmp_path: Path) -> None:
    """A model that Transformers has and the table has not: refused without the row, served with it."""
    program = (
        f"DIRECTORY = {str(tmp_path / 'vipllava')!r}; "
        f"sys.path.append({str(Path(__file__).parent)!r})\n{ASK_VIPLLAVA}"
    )
    refused = copied.ask(program)
    assert refused.startswith("VipLlavaForConditionalGeneration is not supported by the portable engine")
    row = '    "vipllava": Family("VipLLaVA", _LLAVA),'
    copied.add_line("engines/transformers/families.py", '"llava": Family(', row)
    assert copied.ask(program) == ["VipLLaVA", 4, 6]
    assert len(copied.touched) == 1


PARROT = '''
"""Says the prompt again."""

from dynamo.trtllm.core import Step, Usage
from dynamo.trtllm.engines.double import DoubleEngine


class ParrotEngine(DoubleEngine):
    async def generate(self, request):
        ids = request.prompt.token_ids
        yield Step(ids, None, "length", None, Usage(len(ids), len(ids)))
'''
SERVE_BY_THE_PARROT = '''
import asyncio, json
from dynamo.trtllm.engines.factory import create_engine, require_installed
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.request_handlers.handlers import create_handler
from dynamo.trtllm.utils.command_line import build_parser
from dynamo.trtllm.utils.trtllm_utils import parse

class Context:
    def id(self):
        return "1"
    def trace_headers(self):
        return None

async def serve(config):
    require_installed(config.engine.kind)
    engine = create_engine(config.engine)
    handler = await create_handler(config, engine, await engine.start(), None)
    stream = await handler.respond({"model": "m", "token_ids": [7, 8, 9]}, Context())
    ids = [each async for step in stream for each in step.token_ids]
    await handler.close()
    await engine.close()
    return ids

def refusal(*words):
    try:
        parse([*words, "--model-path", "demo"])
    except StartupError as error:
        return error.message

print(json.dumps({
    "tokens": asyncio.run(serve(parse(["--engine", "parrot", "--model-path", "demo"]).config)),
    "named in help": "parrot" in build_parser().format_help(),
    "unknown": refusal("--engine", "budgerigar"),
}))
'''
START_THE_PARROT = '''
import json
from dynamo.trtllm.config import EngineConfig, EngineKind
from dynamo.trtllm.engines.factory import create_engine, require_installed
from dynamo.trtllm.errors import StartupError

said = []
parrot = EngineConfig(kind=EngineKind.PARROT)
for start in (lambda: require_installed(EngineKind.PARROT), lambda: create_engine(parrot)):
    try:
        start()
    except StartupError as error:
        said.append(error.message)
print(json.dumps(said))
'''
PIGEON = '''
"""Copies within the process, under another name."""

from typing import ClassVar

from dynamo.trtllm.transfer.local import LocalTransport


class PigeonTransport(LocalTransport):
    name: ClassVar[str] = "pigeon"
'''
HAND_OVER_BY_PIGEON = '''
import asyncio, json
import torch
from dynamo.trtllm.config import TransferConfig
from dynamo.trtllm.transfer.registry import create_transfer

async def main():
    sender, reader = (create_transfer(TransferConfig(backend="pigeon", pool_bytes=1 << 16)) for _ in range(2))
    await sender.start()
    await reader.start()
    offer = await sender.offer({"x": torch.tensor([1.0, 2.0, 3.0])}, 5.0)
    async with await reader.fetch(offer.descriptor, 5.0) as received:
        values = received.tensors["x"].tolist()
    await offer.settled(5.0)
    found = [offer.descriptor.transport, values, sender.stats().pool_used_bytes]
    await reader.close()
    await sender.close()
    return found

print(json.dumps(asyncio.run(main())))
'''
NEW_RELEASE = '''
"""TensorRT-LLM 1.5.0."""

from dataclasses import replace

from dynamo.trtllm.engines.tensorrt_llm.record.releases import v1_4_0rc2 as before

RELEASE = replace(
    before.RELEASE,
    version="1.5.0",
    llm_arguments={**before.RELEASE.llm_arguments, "brand_new": "D150"},
    read_in={"D150": "docs of 1.5.0"},
)
'''
JUDGE_THE_RELEASE = '''
import json
from dataclasses import replace
from dynamo.trtllm.config import EngineConfig
from dynamo.trtllm.engines.tensorrt_llm.record import SOURCES, nearest_release
from dynamo.trtllm.preflight.faults import find_faults
from dynamo.trtllm.preflight.versions import untested
from dynamo.trtllm.utils.trtllm_utils import parse

config = parse(["--model-path", "demo"]).config
args = {**config.engine.args, "brand_new": 3, "brand_newer": 4}
config = replace(config, engine=replace(config.engine, args=args))
record, note = nearest_release("1.5.0")
print(json.dumps({
    "nearest": record.version,
    "note": note,
    "untested": [each for each in untested() if "TensorRT-LLM" in each],
    "faults": [each for each in find_faults(config) if "brand_n" in each],
    "source": SOURCES.get("D150"),
}))
'''
ASK_VIPLLAVA = '''
import asyncio, json
import numpy as np
import torch
import transformers as tf
from PIL import Image
from dynamo.trtllm.config import EngineConfig, EngineKind, Modality
from dynamo.trtllm.core import DecodedImage, PlacedMedia, Prompt, Sampling
from dynamo.trtllm.engines.factory import create_engine
from dynamo.trtllm.engines.port import EngineRequest
from dynamo.trtllm.errors import StartupError
from engines import families

def save():
    tower = tf.CLIPVisionConfig(**families._CLIP, projection_dim=32)
    text = tf.LlamaConfig(**families.text_config())
    config = tf.VipLlavaConfig(
        text_config=text, vision_config=tower,
        image_token_index=families.IMAGE, vision_feature_layers=[-1, -2],
    )
    _, processor = families.llava()
    torch.manual_seed(0)
    tf.VipLlavaForConditionalGeneration(config).eval().save_pretrained(DIRECTORY)
    processor.save_pretrained(DIRECTORY)

async def main():
    save()
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS, model_path=DIRECTORY, modality=Modality.MULTIMODAL, device="cpu"
    )
    engine = create_engine(config)
    try:
        info = await engine.start()
        image = Image.fromarray(np.zeros((28, 28, 3), np.uint8))
        (item,) = await engine.encode([DecodedImage("d", image)])
        ids = (1, 20, *item.token_ids, 30)
        prompt = Prompt(ids, (PlacedMedia(item, 2, len(item.token_ids)),))
        sampling = Sampling(max_tokens=6, ignore_eos=True)
        request = EngineRequest(request_id="r", prompt=prompt, sampling=sampling)
        steps = [step async for step in engine.generate(request)]
        return [info.extras["family"], len(item.token_ids), sum(len(step.token_ids) for step in steps)]
    except StartupError as error:
        return error.message
    finally:
        await engine.close()

print(json.dumps(asyncio.run(main())))
'''
