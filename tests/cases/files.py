"""Files that cases refer to by `file://`: the image, its embeddings in each form,
and embedding files that are none."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors.torch import save_file

from cases.images import png
from processes.prefork import run_python


class Evil:
    """Unpickling this would write a file; no reader of embeddings may run it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("/tmp/dynamo-trtllm-case-ran-code"),)  # type: ignore[return-value]


def write_files(folder: Path) -> None:
    """Fill `folder`. The embeddings are made by the demo model's own encoder,
    through the command that users have."""
    (folder / "picture.png").write_bytes(png())
    made = folder / "picture.pt"
    words = ("-m", "dynamo.trtllm.embeddings", str(folder / "picture.png"), "-o", str(made))
    run_python(*words, "--model-path", "demo", "--engine", "transformers")
    content = torch.load(made, weights_only=True)
    features = content["mm_embeddings"] if isinstance(content, dict) else content
    grid = content["image_grid_thw"] if isinstance(content, dict) else None
    extra = {} if grid is None else {"image_grid_thw": grid}
    torch.save({"mm_embeddings": features, **extra, "note": "kept for the engine"}, folder / "dictionary.pt")
    tensors = {"mm_embeddings": features.contiguous()}
    if grid is not None:
        tensors["image_grid_thw"] = torch.as_tensor(grid)
    save_file(tensors, str(folder / "picture.safetensors"))
    _write_bad(folder, features, extra)


def _write_bad(folder: Path, features: torch.Tensor, extra: dict[str, object]) -> None:
    (folder / "evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"mm_embeddings": features[:, :-1].clone(), **extra}, folder / "narrow.pt")
    broken = features.clone()
    broken[0, 0] = float("nan")
    torch.save({"mm_embeddings": broken, **extra}, folder / "nan.pt")
    torch.save({"mm_embeddings": features.to(torch.int32), **extra}, folder / "integers.pt")
    torch.save({"mm_embeddings": features[:0].clone(), **extra}, folder / "none.pt")
    torch.save(torch.zeros(1).expand(1 << 22, features.shape[-1]), folder / "expanded.pt")
    whole = (folder / "picture.pt").read_bytes()
    (folder / "half.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"other": features.clone()}, folder / "empty.pt")
    (folder / "link.pt").symlink_to("/etc/hostname")
