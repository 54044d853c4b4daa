"""Quantizes a checkpoint (``pack-quantized``), shard by shard.

Invariants: the new folder appears whole or not at all, since it is written under a temporary name and renamed at the
end; one shard at a time is in memory; tensors other than the matrices of layers are copied unchanged.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from snapstream.config import ModelConfig, WeightFormat
from snapstream.models.checkpoint import StoredTensor, check_checkpoint, open_shard, pack_matrix
from snapstream.models.config_json import read_object
from snapstream.models.gguf_header import is_gguf
from snapstream.models.quantization import INDEX_FILE, SINGLE_FILE, quantization_config
from snapstream.models.registry import read_model_config, tensor_specs
from snapstream.models.tensors import checkpoint_parts

COPIED = (".json", ".jinja", ".model", ".txt", ".md")  # settings, tokenizer, license

Progress = Callable[[str], None]


def quantize_checkpoint(
    source: Path,
    target: Path,
    form: WeightFormat,
    progress: Progress = lambda _: None,
    *,
    attention: WeightFormat | None = None,
) -> None:
    """Write ``target``, a folder that must not exist; ``progress`` is called with a line per file.

    The matrices of the layers are quantized to ``form``, those of attention to ``attention`` if given. ValueError for
    an unsupported or already quantized model, for rows that are not whole groups, and for errors of the disk.
    """
    if is_gguf(source):
        raise ValueError(f"{source} is a GGUF file; checkpoint folders of safetensors are quantized to files")
    config = read_model_config(source)
    stored = config.stored
    if stored.quantized is not None or stored.dequantized:
        raise ValueError(f"{source} is quantized already ({stored.describe_quantized()})")
    if config.is_text_part:
        raise ValueError(f"{source} also has a vision tower; only checkpoints of text models are quantized to files")
    matrices = _matrices(config, form, attention or form)
    manifest = check_checkpoint(source, config)
    with _whole_or_nothing(target) as folder:
        weight_map, size = _write_shards(manifest, matrices, folder, progress)
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        settings = read_object(source / "config.json") | {
            "quantization_config": quantization_config(form, _routers(config), attention)
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for file in sorted(source.iterdir()):
            is_written = file.name == INDEX_FILE or (folder / file.name).exists()
            if file.is_file() and file.suffix in COPIED and not is_written:
                shutil.copyfile(file, folder / file.name)


def _matrices(config: ModelConfig, form: WeightFormat, attention: WeightFormat) -> dict[str, WeightFormat]:
    """Formats of the checkpoint's tensors that are quantized, by name."""
    specs = {name: spec for name, spec in tensor_specs(config).items() if spec.is_quantized}
    formats = {name: attention if spec.is_attention else form for name, spec in specs.items()}
    if any(spec.is_transposed for spec in specs.values()):
        raise ValueError(
            f"{config.architecture} checkpoints have the experts of a layer in one tensor, which pack-quantized does "
            f"not hold; quantize them at load: --weights {form.dtype}"
        )
    for name, own in formats.items():
        if specs[name].shape[-1] % own.group:
            raise ValueError(
                f"weights are {own.describe()}; the rows of {name} have {specs[name].shape[-1]} numbers, which must be "
                f"a multiple of {own.group}"
            )
    return {part.name: formats[part.target] for part in checkpoint_parts(specs, config.num_layers)}


def _routers(config: ModelConfig) -> list[str]:
    """Modules of the layers that choose experts."""
    router = tensor_specs(config).get("router")
    return [] if router is None else [name.removesuffix(".weight") for name in router.parts]


def _write_shards(
    manifest: dict[str, StoredTensor], matrices: dict[str, WeightFormat], folder: Path, progress: Progress
) -> tuple[dict[str, str], int]:
    """The file of every tensor, and the bytes of all."""
    weight_map: dict[str, str] = {}
    size = 0
    files = list(dict.fromkeys(stored.file for stored in manifest.values()))
    for number, file in enumerate(files, 1):
        progress(f"{file.name} ({number} of {len(files)})")
        tensors: dict[str, Tensor] = {}
        shard = open_shard(file)
        for name in shard.offset_keys():
            numbers = shard.get_tensor(name)
            if numbers.is_floating_point() and not torch.stack(torch.aminmax(numbers)).isfinite().all():
                raise ValueError(f"{file}: {name} holds NaN or infinity; weights must be finite")
            tensors |= pack_matrix(name, numbers, matrices[name]) if name in matrices else {name: numbers}
        own = SINGLE_FILE if len(files) == 1 else file.name
        save_file(tensors, folder / own, metadata={"format": "pt"})
        (folder / own).chmod(0o644)
        weight_map |= dict.fromkeys(tensors, own)
        size += sum(tensor.nbytes for tensor in tensors.values())
    return weight_map, size


@contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to ``target`` unless something fails."""
    if target.exists():
        raise ValueError(f"{target} exists; quantize writes a new folder")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder; quantize makes {target.name} in it")
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        folder.chmod(0o755)  # mkdtemp makes private folders
        yield folder
        folder.rename(target)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
