"""What has to be touched to add something: each test adds one, in a process of its own, and looks at all it must lead to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dynamo.trtllm import config

ADD_FLAGS = '''
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
'''


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
