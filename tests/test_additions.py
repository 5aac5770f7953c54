"""What has to be touched to add something: each test adds one, in a process of its own, and looks at all it must lead to."""

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
from dynamo.trtllm import config
from dynamo.trtllm.flag import Flag, flag
from dynamo.trtllm.roles import Role
from dynamo.trtllm.values import COUNT, SECONDS

@dataclass(frozen=True, kw_only=True)
class MediaConfig(config.MediaConfig):
    max_rows: int = flag("--max-rows", COUNT, 7, "Most rows of a table.", roles=frozenset({Role.PREFILL}), shared="MAX_ROWS")

config.MediaConfig = MediaConfig
config.ENGINE_FLAGS += (Flag("--tile-size", COUNT, None, "Size of a tile.", argument="tile_config.size"),)

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
    "flag over variable": outcome("--modality", "multimodal", "--max-rows", "3", DYN_TRTLLM_MAX_ROWS="4", MAX_ROWS="6"),
    "other role": outcome("--disaggregation-mode", "decode", "--max-rows", "3"),
    "bad flag": outcome("--max-rows", "0"),
    "bad variable": outcome(DYN_TRTLLM_TILE_SIZE="x"),
    "fault": [each for each in find_faults(parse([*PREFILL, "--trtllm.tile_config.size", "0"]).config) if "tile" in each],
    "help": " ".join(build_parser().format_help().split()),
    "table": flag_table(),
}))
"""


@pytest.fixture(scope="module")
def added() -> dict[str, Any]:
    """What a process finds in which `config.py` declares one flag more of a layer, and one more of an engine argument."""
    result = subprocess.run([sys.executable, "-c", ADD_FLAGS], capture_output=True, text=True, timeout=120, check=False)
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
    assert "tile_config.size 0 (--trtllm.tile_config.size) must be a whole number of at least 1" in added["fault"]


def test_a_declared_flag_stands_in_help_and_in_the_readmes_table(added: dict[str, Any]) -> None:
    assert "--max-rows N Most rows of a table. env var: DYN_TRTLLM_MAX_ROWS, MAX_ROWS | default: 7" in added["help"]
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

    def rule(self, model, options):
        return options.get("most", model)

    def inspect(self, data, rule, config):
        if any(len(line.split()) != 3 for line in data.decode().splitlines()):
            raise ClientFault("a line of it is not three numbers")
        return MediaShape(self.name, (len(data.splitlines()),))

    async def decode(self, data, digest, shape, rule, config):
        return DecodedPoints(digest, tuple(tuple(map(float, line.split())) for line in data.decode().splitlines()))
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
    "engines/transformers/encoder.py",  # from the item to features
    "README.md",  # a row of the table of modalities
    "tests/multimodal/test_points.py",
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

PNG = "data:;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
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
    """A fourth kind, added to a copy of the package, goes the way of the others: from a part to its place in the prompt."""
    package = tmp_path / "dynamo" / "trtllm"
    shutil.copytree(Path(config.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "model"))
    for name, edited in KIND_IN_THE_PIPELINE.items():
        file = package / name
        before = file.read_text() if file.exists() else ""
        file.write_text(edited(before))
        assert file.read_text() != before
    asked = subprocess.run(
        [sys.executable, "-c", ASK_ABOUT_POINTS, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert found["mixed"] == [[1, 6, 6, 2, 9, 9], ["points", "image"]]
    assert found["bad"] == "points 1: a line of it is not three numbers"
    assert found["two"] == "the request holds 2 point clouds; this worker takes at most 1"
    assert found["not taken"] == "points 1: the model m takes no point clouds on this worker; it takes images only"
    assert found["unknown"] == (
        "content parts of type smell_url are not supported; "
        "a content part is text, image_url, video_url, audio_url, input_audio or points_url"
    )
    assert len(KIND_IN_THE_PIPELINE) + len(KIND_IN_AN_ENGINE_AND_IN_PROSE) <= 6
