"""An index of shards names files of its own folder, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models.test_loader import CONFIG, load, tensors_of, write_shards

INDEX = "model.safetensors.index.json"
OUTSIDE = ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "sub/x.safetensors", "..", "", "a\\b", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_shards_outside_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (shard,) = write_shards(folder, tensors_of(CONFIG), 1)
    target = folder / name if "\0" not in name else shard
    if name.endswith(".safetensors") and not name.startswith("/"):  # it is there, and whole
        (folder / "sub").mkdir()
        (folder / "a").mkdir()
        shard.rename(target.resolve())
    index = {"weight_map": dict.fromkeys(tensors_of(CONFIG), name)}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(f"{folder / INDEX}: weight_map names {name!r} for model.")):
        load(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"weight_map": {"a": 5}}', "weight_map names int 5 for a; it must be the name of a file"),
        ('{"weight_map": {"a": ["x.safetensors"]}}', "weight_map names list"),
        ('{"weight_map": null}', "is not an index of shards: weight_map is NoneType None"),
        ('{"weight_map": {}}', "is not an index of shards"),
        ("{}", "is not an index of shards"),
        ("[]", "holds a list; expected an object"),
        ('{"weight_map": ' + '{"a":' * 100_000, "is not valid JSON: it is nested too deeply"),
        ('{"weight_map": {', "is not valid JSON"),
    ],
)
def test_broken_indices(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / INDEX)) + r":? " + re.escape(reason)):
        load(tmp_path)


def test_links_out_of_the_folder_are_followed(tmp_path: Path) -> None:
    """Caches of model hubs: a snapshot of links to blobs that lie elsewhere."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    tensors: dict[str, Any] = tensors_of(CONFIG)
    for number, shard in enumerate(write_shards(snapshot, tensors, 2)):
        shard.rename(blobs / f"{number}")
        shard.symlink_to(Path("..") / "blobs" / f"{number}")
    assert torch.equal(load(snapshot).final_norm, tensors["model.norm.weight"])
