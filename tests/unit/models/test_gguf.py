"""GGUF files: settings, vocabularies, and what is refused."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as ggml
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from snapstream import LLM, Grammar, SamplingParams
from snapstream.cli.app import main
from snapstream.config import EngineOptions
from snapstream.kernels.groups import dequantize, dequantize_uint4, k_scales
from snapstream.models import gguf, gguf_architectures
from snapstream.models.checkpoint import check_checkpoint, load_weights
from snapstream.models.config_json import fingerprint
from snapstream.models.gguf_header import DEQUANTIZED, K_QUANTS, read_header, shortest
from snapstream.models.hub import model_name
from snapstream.models.matrix import decode
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import find_tokenizer, has_tokenizer, load_tokenizer
from snapstream.plan.fit import weight_formats
from snapstream.spec_prefill.compressor import PromptCompressor
from tests.gguf_files import ARCHITECTURES, MODELS, write_gguf
from tests.parity.checkpoints import make_model, save

TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\n\n\tand a tab \r\n", "it's we'll I'D they've", "12345 1,234.5 0x1F",
    "größer Straße 中文字符 日本語かな 한국어 हिन्दी", "e\u0301 \u00e9 \u212b", "😀👍🏽 \u200b\x00\x7f",
    "a_b-c/d\\e=f(g)[h]{i}", "...!!!\n???",
    "1234567 x12345y", "\n\n\n a \r\n\r\n b", " " * 9 + "x" + " " * 300 + "y" + " " * 7,
    "<|end|>", "x<|end|>y <|user|> z", "don't STOP camelCaseWords HTTPServer", "\u3000\u00a0thin\u2009space",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama-gqa-tied"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return write_gguf(folder, folder / "model.gguf")


def test_the_config_is_that_of_the_folder(folder: Path, file: Path) -> None:
    """But for the order in which rows of q and k are stored."""
    ours, theirs = read_model_config(file), read_model_config(folder)
    assert ours.rope.is_interleaved
    rope = replace(ours.rope, is_interleaved=False)
    assert replace(ours, rope=rope, bos_token_id=1, eos_token_ids=(2,)) == theirs
    assert model_name(file) == "model" and not has_tokenizer(file) and find_tokenizer(file) is None
    assert len(fingerprint(file)) == 32 and fingerprint(file) != fingerprint(folder)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL"])
def test_blocks_of_integers_are_exact(kind: str) -> None:
    """Every value that a block can hold, both signs of its scale, against gguf's own reference."""
    own = ggml.GGMLQuantizationType[kind]
    size = ggml.GGML_QUANT_SIZES[own][1]
    data = np.random.default_rng(3).integers(0, 256, (64, 4, size), dtype=np.uint8)
    data[..., 1] &= 0xBF  # of fp16: neither infinite nor NaN
    rows = data.reshape(64, -1)
    wanted = torch.from_numpy(ggml.quants.dequantize(rows, own))
    scales, values = gguf.scales_of(rows, kind), gguf.values_of(rows, kind)
    for bits in (8, 4) if kind == "Q4_0" else (8,):
        codes = gguf.packed_codes(values, bits).reshape(64, -1)
        assert torch.equal(dequantize(torch.from_numpy(codes), torch.from_numpy(scales), bits), wanted)


def test_blocks_with_minimums() -> None:
    own, draw = ggml.GGMLQuantizationType.Q4_1, np.random.default_rng(3)
    data = draw.integers(0, 256, (64, 3, 20), dtype=np.uint8)
    for at in (1, 3):
        data[..., at] = draw.integers(0, 0x40, (64, 3), dtype=np.uint8)
    rows = data.reshape(64, -1)
    scales, values = gguf.scales_of(rows, "Q4_1"), gguf.values_of(rows, "Q4_1")
    assert (values.min(), values.max()) == (-8, 7) and values.shape == (64, 3, 32)
    codes = gguf.packed_codes(values, 4).reshape(64, -1)
    found = dequantize_uint4(torch.from_numpy(codes), torch.from_numpy(scales)).numpy()
    assert np.array_equal(found, ggml.quants.dequantize(rows, own))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_blocks_of_k_quants_are_exact(kind: str) -> None:
    """Any bytes with factors up to 2, tiny and large ones, against gguf's own reference."""
    own, form, draw = ggml.GGMLQuantizationType[kind], gguf.OWN[kind], np.random.default_rng(3)
    size = ggml.GGML_QUANT_SIZES[own][1]
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2)[: 1 + form.has_minimums])
    for exponents in (0, 0x40), (0, 8), (0x40, 0x60):
        data = draw.integers(0, 256, (64, 3, size), dtype=np.uint8)
        for at in places:
            data[..., at + 1] = draw.integers(*exponents, (64, 3), dtype=np.uint8)
        rows = data.reshape(64, -1)
        wanted = ggml.quants.dequantize(rows, own)
        scales, values = gguf.scales_of(rows, kind), gguf.values_of(rows, kind)
        assert scales.shape == (64, 3, form.scale_bytes) and values.shape == (64, 768 // form.group, form.group)
        codes = torch.from_numpy(gguf.packed_codes(values, form.bits).reshape(64, -1))
        assert codes.shape[1] == 96 * form.bits
        assert np.array_equal(decode(codes, torch.from_numpy(scales), form).numpy(), wanted)
        if kind == "Q4_K" and exponents[1] <= 0x40:  # where columns change their order
            in_groups = torch.from_numpy(gguf.in_groups(scales))
            factors = [
                line.half().float().repeat_interleave(32, 1) for line in k_scales(torch.from_numpy(scales), form)
            ]
            numbers = torch.from_numpy(values.reshape(64, -1) + np.int8(8)).float()
            assert torch.equal(dequantize_uint4(codes, in_groups), numbers * factors[0] + factors[1])


@pytest.mark.parametrize("kind", [*DEQUANTIZED, *K_QUANTS, "Q4_1"])
def test_other_types_are_dequantized_by_the_reference(kind: str) -> None:
    own = ggml.GGMLQuantizationType[kind]
    block, size = ggml.GGML_QUANT_SIZES[own]
    data = np.random.default_rng(3).integers(0, 256, (5, 3 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = ggml.quants.dequantize(data, own)
    assert wanted.shape == (5, 3 * block)
    assert np.array_equal(gguf.numbers_of(data, kind), wanted, equal_nan=True)


def test_a_setting_has_the_digits_that_were_written() -> None:
    for value in (1e-6, 1e-5, 10000.0, 1e6, 5e5, 0.1, 3.0):
        assert shortest(struct.unpack("<f", struct.pack("<f", value))[0]) == value
    odd = struct.unpack("<f", struct.pack("<f", 1 / 3 + 1e-8))[0]
    assert struct.pack("<f", shortest(odd)) == struct.pack("<f", odd)


# Vocabularies.


def trained(pattern: str | None) -> Tokenizer:
    """Byte-level BPE of this file's texts, cut by a pattern."""
    own = Tokenizer(models.BPE())
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    own.pre_tokenizer, own.decoder = pre_tokenizers.Sequence([*cut, last]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|begin|>", "<|end|>", "<|user|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator([*TEXTS, Path(__file__).read_text()], trainer)
    return own


def metadata(kind: str, tokens: list[str], special: int = 3, **more: Any) -> dict[str, Any]:
    settings = {"model": kind, "tokens": tokens, "token_type": [3] * special + [1] * (len(tokens) - special), **more}
    return {f"tokenizer.ggml.{name}": value for name, value in settings.items()}


def by_id(own: Tokenizer) -> list[str]:
    return [token for token, _ in sorted(own.get_vocab().items(), key=lambda pair: pair[1])]


def merges_of(own: Tokenizer) -> list[str]:
    import json

    return [" ".join(merge) for merge in json.loads(own.to_str())["model"]["merges"]]


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PUBLISHED = {  # patterns of tokenizer.json: Seed-Coder and Seed-OSS, Ling, Jais 2, Cohere's North
    "seed-coder": [rf"{_ENDS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "bailingmoe2": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "jais-2": [
        rf"{_ENDS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|\s{{512}}(?!\S)|\s{{256}}(?!\S)|\s{{128}}(?!\S)"
        r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "cohere2moe": [
        r"\d{1,3}(?=(?:\d{3})*\b)",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


def rebuilt(own: Tokenizer, cut: Any) -> Any:
    """The same vocabulary with another way to cut texts."""
    own.pre_tokenizer = cut
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own)


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "qwen2", "gpt-2", "tekken", "gpt-4o", "qwen35", "dbrx", "refact", *PUBLISHED]
)
def test_byte_level_vocabularies(pre: str, folder: Path, tmp_path: Path) -> None:
    """Ids are those of transformers: its own classes, and its own reader of GGUF files."""
    own = trained(None if pre == "gpt-2" else LLAMA3)
    tokens = metadata(
        "gpt2",
        by_id(own),
        merges=merges_of(own),
        pre=pre,
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=pre == "tekken",
    )
    arch = "qwen2" if pre.startswith("qwen") else "llama"
    source = save(make_model("qwen2"), tmp_path) if arch == "qwen2" else folder
    file = write_gguf(source, tmp_path / "model.gguf", tokens=tokens | {"tokenizer.chat_template": "{{ bos_token }}"})
    ours = load_tokenizer(file)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    vocabulary, merges = own.get_vocab(), [tuple(merge.split(" ")) for merge in merges_of(own)]
    theirs: Any = peer
    if pre in ("qwen2", "qwen35"):
        own_class = transformers.Qwen2Tokenizer if pre == "qwen2" else transformers.Qwen3_5Tokenizer
        theirs = own_class(vocab=vocabulary, merges=merges, unk_token="<|end|>", eos_token="<|end|>",
                                             pad_token="<|end|>")  # fmt: skip
        theirs.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|user|>"]})
    if pre == "gpt-2":
        theirs = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges, unk_token="<|end|>", bos_token="<|begin|>",
                                            eos_token="<|end|>")  # fmt: skip
        theirs.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    if pre == "refact":  # as StarCoder's own files
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs = rebuilt(own, pre_tokenizers.Sequence(cuts))
    if pre in PUBLISHED:
        cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in PUBLISHED[pre]]
        theirs = rebuilt(own, pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)]))
    if theirs is peer and isinstance(peer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        pytest.skip(f"transformers {transformers.__version__} splits every vocabulary as GPT-2's, whatever its pre")
    for text in TEXTS:
        found = ours(text, add_special_tokens=False)["input_ids"]
        assert found == theirs(text, add_special_tokens=False)["input_ids"], text
        first = [0] if pre == "tekken" else []
        assert ours(text)["input_ids"] == first + found
        assert ours.decode(found) == text or pre.startswith("qwen")  # NFC
    assert ours.chat_template == "{{ bos_token }}" and ours.bos_token == "<|begin|>" and ours.eos_token_id == 1
    assert ours.is_fast and ours("Hello", return_offsets_mapping=True)["offset_mapping"][-1][1] == 5


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token those with the best score are joined, the first first;
    what is no token then is bytes.
    """
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [
            (-scores[a + b], at) for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        own for piece in pieces for own in ([piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


def test_sentence_pieces(folder: Path, tmp_path: Path) -> None:
    """Against SentencePiece's rule on plain lists."""
    draw = random.Random(5)
    words = {"".join(draw.choices("abcdeth\u2581", k=n)) for n in (2, 2, 2, 3, 3, 4, 5) for _ in range(40)}
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz'\u2581"))
    pieces = [*sorted(words, key=lambda word: (len(word), word)), *letters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(at) for at in range(len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    own = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "bos_token_id": 1,
           "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip
    given = {f"tokenizer.ggml.{name}": value for name, value in own.items()}
    ours = load_tokenizer(write_gguf(folder, tmp_path / "model.gguf", tokens=given))
    rule = dict(zip(pieces, scores[259:], strict=True))
    samples = [*TEXTS[:6], *("".join(draw.choices("abcdeth  ", k=30)) for _ in range(200)), "\u00e9 \u4e2d"]
    for text in samples:
        found = ours(text)["input_ids"]
        assert found[0] == 1
        assert ours.convert_ids_to_tokens(found[1:]) == by_scores(text, rule), text
        assert ours.decode(found[1:]) == text
    bare = given | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    other = load_tokenizer(write_gguf(folder, tmp_path / "bare.gguf", tokens=bare))
    assert other.convert_ids_to_tokens(other("z")["input_ids"]) == ["z"]
    for change, reason in [
        ({"tokenizer.ggml.scores": [0.0]}, "tokens and 1 scores"),
        ({"tokenizer.ggml.precompiled_charsmap": "x"}, "precompiled_charsmap is not supported"),
        ({"tokenizer.ggml.tokens": [*tokens[:-1], "z" * 300]}, "a token has 300 characters; the limit is 256"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; known: 'gpt2'"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000; the vocabulary has"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokens and 2 types"),
    ]:
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(write_gguf(folder, tmp_path / "wrong.gguf", tokens=given | change))


def test_gemma_4s_vocabulary(folder: Path, tmp_path: Path) -> None:
    """Ids are those of transformers' class; an answer ends with its turn, and where a tool's begins."""
    own = Tokenizer(models.BPE(byte_fallback=True))
    own.normalizer = normalizers.Replace(" ", "\u2581")
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn|>", "<|tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*first, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    own.train_from_iterator([*TEXTS[:-1], *("the cat is the\n\n end" for _ in range(9))], trainer)
    tokens, merges = by_id(own), merges_of(own)
    kinds = [3, 3, 3, 2, 3, 3, 4] + [6] * 256 + [1] * (len(tokens) - 263)
    given = metadata("gemma4", tokens, merges=merges, bos_token_id=2, eos_token_id=1, unknown_token_id=3)
    file = write_gguf(folder, tmp_path / "model.gguf", tokens=given | {"tokenizer.ggml.token_type": kinds})
    ours, theirs = load_tokenizer(file), transformers.GemmaTokenizer(
        vocab=own.get_vocab(), merges=[tuple(merge.split(" ")) for merge in merges]
    )  # fmt: skip
    for text in [*TEXTS, " two  spaces", "a\n\n\nb<turn|>"]:
        found = ours(text)["input_ids"]
        assert found[0] == 2 and (found[-1] == 5) == ("<turn|>" in text)
        if "<turn|>" not in text:
            assert found[1:] == theirs(text, add_special_tokens=False)["input_ids"], text
            assert ours.decode(found[1:]) == text
    assert read_model_config(file).eos_token_ids == (1, 5, 6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.pre": "poro-chat"}, "tokenizer.ggml.pre is 'poro-chat'; known: llama-bpe"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "'a b c' in tokenizer.ggml.merges is not two tokens"),
        ({"tokenizer.ggml.merges": ["zq qz"]}, "its vocabulary makes no tokenizer"),
        ({"tokenizer.ggml.merges": 3}, "tokenizer.ggml.merges is 3; it must be an array of texts"),
        ({"tokenizer.chat_template": "x" * (2**20 + 1)}, "chat_template must be a text of at most 1,048,576"),
    ],
)
def test_vocabularies_that_are_refused(change: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    given = metadata("gpt2", ["<a>", "<b>", "<c>", "a", "b"], merges=["a b"], pre="qwen2")
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(write_gguf(folder, tmp_path / "model.gguf", tokens=given | change))


def test_end_tokens(folder: Path, tmp_path: Path) -> None:
    """Those that the metadata names, and control tokens that end an answer; in gpt-oss one of them ends a message."""
    tokens = ["<|begin|>", "<|end|>", "<|im_end|>", "<|eot_id|>", "a"]
    own = metadata("gpt2", tokens, special=3, eos_token_id=4, eot_token_id=0)
    path = write_gguf(folder, tmp_path / "model.gguf", tokens=own)
    assert read_model_config(path).eos_token_ids == (4, 0, 2, 1)  # <|eot_id|> is no control token here
    own = metadata("gpt2", ["<|return|>", *tokens], special=3, eos_token_id=0)
    assert read_model_config(write_gguf(folder, tmp_path / "b.gguf", tokens=own)).eos_token_ids == (0,)


def test_every_architecture_is_in_the_tests_data() -> None:
    """``MODELS`` and gpt-oss, which tests/parity/test_gguf.py reads, and the table of docs/models.md."""
    assert {*ARCHITECTURES.values(), "nemotron_h"} == set(gguf_architectures.ARCHITECTURES)


# Wrong input.


def changed(file: Path, target: Path, at: int, data: bytes) -> Path:
    own = bytearray(file.read_bytes())
    own[at : at + len(data)] = data
    target.write_bytes(own)
    return target


def test_broken_files(file: Path, tmp_path: Path) -> None:
    own = file.read_bytes()
    wrong = tmp_path / "wrong.gguf"
    first_array = own.index(b"tokenizer.ggml") if b"tokenizer.ggml.tokens" in own else None
    assert first_array is None
    cases = {
        "not a GGUF file: it begins with b'PK": b"PK\x03\x04" + own[4:],
        "is GGUF version 9; versions 2 and 3": own[:4] + struct.pack("<I", 9) + own[8:],
        "cannot be read": b"",
        "is truncated: its header ends": own[:20],
        "counts 1,099,511,627,776 tensors": own[:8] + struct.pack("<Q", 2**40) + own[16:],
        "is truncated: it has": own[:-100],
        "a text of the header has 18,446,744,073,709,551,615 bytes": own[:24] + b"\xff" * 8 + own[32:],
    }
    for reason, data in cases.items():
        wrong.write_bytes(data)
        with pytest.raises(ValueError, match=reason):
            read_model_config(wrong)
    place = own.index(b"token_embd.weight") + len(b"token_embd.weight")
    with pytest.raises(ValueError, match="'token_embd.weight' has the tensor type 77, which is not known"):
        read_model_config(changed(file, wrong, place + 4 + 16, struct.pack("<I", 77)))
    with pytest.raises(ValueError, match="'token_embd.weight' is stored as I32; known: F32"):
        read_model_config(changed(file, wrong, place + 4 + 16, struct.pack("<I", 26)))
    with pytest.raises(ValueError, match="'token_embd.weight' has 9 dimensions"):
        read_model_config(changed(file, wrong, place, struct.pack("<I", 9)))
    with pytest.raises(ValueError, match="is truncated: it has .* 'token_embd.weight' ends at byte"):
        read_model_config(changed(file, wrong, place + 4, struct.pack("<Q", 2**50)))
    place = own.index(b"llama.rope.freq_base")
    with pytest.raises(ValueError, match="llama.zope.freq_base is 10000.0, which is not supported"):
        read_model_config(changed(file, wrong, place + 6, b"z"))
    place = own.index(b"llama.block_count") + len(b"llama.block_count")
    with pytest.raises(ValueError, match="checkpoint lacks model.layers.3.input_layernorm.weight"):
        check_checkpoint(wrong, read_model_config(changed(file, wrong, place + 4, struct.pack("<I", 4))))
    with pytest.raises(ValueError, match="checkpoint holds model.layers.2.* and .* more, which LlamaForCausalLM"):
        check_checkpoint(wrong, read_model_config(changed(file, wrong, place + 4, struct.pack("<I", 2))))


def test_arrays_of_absurd_lengths(folder: Path, tmp_path: Path) -> None:
    tokens = metadata("gpt2", ["a", "b", "c", "d"], merges=["a b"], pre="qwen2")
    good = write_gguf(folder, tmp_path / "good.gguf", tokens=tokens)
    own, wrong = good.read_bytes(), tmp_path / "wrong.gguf"
    for name in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"):
        place = own.index(name) + len(name) + 8
        for count in (2**62, 10**9, 2**22):
            tracemalloc.start()
            with pytest.raises(
                ValueError, match=f"{name.decode()} has {count:,} entries|is truncated: {name.decode()}"
            ):
                read_model_config(changed(good, wrong, place, struct.pack("<Q", count)))
            assert tracemalloc.get_traced_memory()[1] < 2**24
            tracemalloc.stop()


def test_what_is_no_model(file: Path, folder: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    with pytest.raises(ValueError, match="pipe.gguf is not a regular file"):
        read_model_config(fifo)
    large = tmp_path / "disk.img"
    with large.open("wb") as opened:
        opened.truncate(2**31)
    with pytest.raises(ValueError, match="disk.img is no model; expected a checkpoint folder, a config.json or a GGUF"):
        read_model_config(large)
    large.rename(tmp_path / "disk.gguf")
    with pytest.raises(ValueError, match="is not a GGUF file: it begins with"):
        read_model_config(tmp_path / "disk.gguf")
    only = tmp_path / "only"
    only.mkdir()
    for name in ("b.gguf", "a.gguf"):
        (only / name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="only holds GGUF files; give one of them: a.gguf, b.gguf"):
        read_model_config(only)
    with pytest.raises(ValueError, match="model.gguf is a GGUF file; checkpoint folders of safetensors are quantized"):
        quantize_checkpoint(file, tmp_path / "out", None)  # type: ignore[arg-type]
    other = ggml.GGUFWriter(tmp_path / "other.gguf", "mamba")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.close()
    with pytest.raises(
        ValueError, match="general.architecture is 'mamba'; GGUF files are read of llama, mistral3, mistral4"
    ):
        read_model_config(tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="absent.gguf cannot be read: No such file"):
        read_model_config(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("qwen3-moe", {"expert_count": 5}, "qwen3moe.expert_count is 5; blk.0.ffn_.*_exps.weight has 6"),
        ("qwen3", {"block_count": 10**6}, "block_count is 1000000; it has 36 tensors"),
        ("qwen3", {"attention.causal": False}, "qwen3.attention.causal is False; only causal attention"),
        ("qwen3", {"rope.dimension_sections": [1, 1]}, "qwen3.rope.dimension_sections is an array of 2 numbers, which"),
        ("granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned is False; heads that are not rotated"),
        ("granite-moe-shared", {"rope.scaling.finetuned": False}, "finetuned is False; heads that are not rotated"),
        ("gemma4", {"rope.dimension_count_swa": 4}, "rope.dimension_count_swa is 4; heads have"),
        ("gemma4-shared", {"feed_forward_length": [8]}, "gemma4.feed_forward_length has 1 numbers for 6 layers"),
        ("gemma4", {"attention.head_count_kv": [1]}, "gemma4.attention.head_count_kv has 1 numbers for"),
        ("nemotron-h", {"feed_forward_length": [8]}, "nemotron_h.feed_forward_length has 1 numbers for 6 layers"),
        ("deepseek-v3", {"expert_gating_func": 1}, "expert_gating_func is 1; with exp_probs_b.bias it must be 2"),
        ("glm4-moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func is 1; it must be 2"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1, 0, 2]}, "head_count_kv differs from layer to layer"),
        ("granite-swa", {"rope.scaling.finetuned": False}, "finetuned is False; heads that are not rotated"),
        ("ling3", {"swiglu_clamp_exp": [0.0, 0.0, 7.0, 0.0]}, "swiglu_clamp_exp has other numbers than 0"),
        ("ling3", {"kda.safe_gate": False}, "kda.safe_gate is False; it must be true"),
        ("mimo-v2", {"attention.head_count_kv": [3, 6, 3, 3, 6]}, "layers of a kind must have the same number"),
        ("cohere2-moe", {"expert_gating_func": 3}, "settings of cohere2moe are missing or wrong: 3"),
        ("mistral4", {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}, "missing or wrong: 'rope_scaling'"),
        ("olmo", {"attention.clamp_kqv": 8.0}, "olmo.attention.clamp_kqv is 8.0, which is not supported"),
    ],
)
def test_settings_that_are_refused(name: str, more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = save(make_model(name, **MODELS[name]), tmp_path)
    with pytest.raises(ValueError, match=reason):
        read_model_config(write_gguf(folder, tmp_path / "model.gguf", more=more))


MUTATED = ("llama-gqa-tied", "qwen3.5-moe", "deepseek-v3", "granite-hybrid-moe", "lfm2-moe", "phi3-longrope",
           "gemma3n", "gemma4-shared", "gemma4-moe", "nemotron-3", "kimi-linear", "ling3", "apertus-panels",
           "mimo-v2", "granite-moe-swa", "minimax-m3", "cohere2-moe")  # fmt: skip


@pytest.mark.parametrize("seed", range(len(MUTATED)))
def test_mutated_files_are_models_or_errors(seed: int, tmp_path: Path) -> None:
    """2,890 files with a few bytes of their header changed, cut or repeated: ValueError or a config, and few bytes of
    memory.
    """
    tokens = metadata("gpt2", ["<a>", "<b>", "<c>", "a", "b", "ab"], merges=["a b"], pre="qwen2", bos_token_id=0)
    name = MUTATED[seed]
    folder = save(make_model(name, **MODELS[name]), tmp_path)
    good = write_gguf(folder, tmp_path / "good.gguf", "F16" if seed % 2 else "F32", tokens=tokens).read_bytes()
    draw, wrong = random.Random(seed), tmp_path / "wrong.gguf"
    header = min(tensor.start for tensor in read_header(tmp_path / "good.gguf").tensors.values())
    found = {"config": 0, "refused": 0}
    tracemalloc.start()
    for number in range(170):
        own = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 8)) if number else 0):  # the first is the file itself
            at = draw.randrange(header)
            match draw.randrange(4):
                case 0:
                    own[at] = draw.randrange(256)
                case 1:
                    own[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
                case 2:
                    del own[at : at + draw.randrange(1, 64)]
                case 3:
                    own[at:at] = own[draw.randrange(header) :][: draw.randrange(1, 64)]
        wrong.write_bytes(own)
        try:
            config = read_model_config(wrong)
            check_checkpoint(wrong, config)
            find_tokenizer(wrong)
            found["config"] += 1
        except ValueError as error:
            assert "\n" not in str(error)[:200]
            found["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(found.values()) > 0 and peak < 2**26, (found, peak)


def test_weights_that_are_not_finite(file: Path, tmp_path: Path) -> None:
    tensor = read_header(file).tensors["blk.1.ffn_up.weight"]
    wrong = changed(file, tmp_path / "wrong.gguf", tensor.start, struct.pack("<f", float("nan")))
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight holds NaN"):
        load_weights(wrong, read_model_config(wrong), torch.float32, "cpu", False)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("Q3_K", 108), ("Q4_K", 0), ("Q4_K", 2), ("Q5_K", 0), ("Q5_K", 2), ("Q6_K", 208), ("IQ4_XS", 0), ("Q4_1", 0)],
)
def test_factors_of_blocks_that_are_not_finite(kind: str, place: int, tmp_path: Path) -> None:
    """In the file, or where their finite numbers are beyond those of the format that was asked for."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    file = write_gguf(save(make_model("qwen3", **MODELS["qwen3"] | sizes), tmp_path), tmp_path / "good.gguf", kind)
    at = read_header(file).tensors["blk.0.ffn_up.weight"].start + place
    for factor, width in (("inf", "auto"), ("nan", "auto"), ("-inf", "float32"), ("65504", "float16")):
        wrong = changed(file, tmp_path / "wrong.gguf", at, struct.pack("<e", float(factor)))
        config = read_model_config(wrong)
        formats = weight_formats(config, EngineOptions(weights=width), device="cpu")  # type: ignore[arg-type]
        what = "NaN" if factor == "nan" else "infinity as float16"
        with pytest.raises(ValueError, match=f"wrong.gguf: model.layers.0.mlp.up_proj.weight_scale holds {what}"):
            load_weights(wrong, config, torch.float32, "cpu", False, formats)


TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_a_file_is_a_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts, conversations, grammars, a draft and the command line answer as the folder with that tokenizer does."""
    own = trained(LLAMA3)
    tokens = metadata("gpt2", by_id(own), merges=merges_of(own), pre="llama-bpe", bos_token_id=0, eos_token_id=2)
    folder = save(make_model("qwen3", vocab_size=len(by_id(own))), tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "own.gguf", tokens=tokens | {"tokenizer.chat_template": TEMPLATE})
    load_tokenizer(file).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    code = SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar.regex("[a-f]{2,6}(-[0-9]{3}){1,2}"))
    talk = [{"role": "user", "content": "Hello, world! 12345"}]
    found, shorter = [], []
    for model in (file, folder):
        with LLM(model, max_model_len=128, progress=False, executor="eager") as llm:
            outputs = [
                *llm.generate(["Hello, world!", "it's we'll"], params), *llm.chat(talk, params),
                *llm.generate("x", code),
            ]  # fmt: skip
            found.append([(output.prompt_token_ids, output.token_ids, output.text) for output in outputs])
        draft = PromptCompressor(model)
        shorter.append(draft.compress("one two three. " * 80, keep=0.3).text)
    assert found[0] == found[1] and shorter[0] == shorter[1]
    assert found[0][0][0][0] == 0 and "-" in found[0][3][2]
    options = ["--raw", "--max-tokens", "12", "--temperature", "0", "--max-model-len", "128", "--executor", "eager"]
    assert main(["generate", str(file), "Hello, world!", *options]) == 0
    assert found[0][0][2].startswith(capsys.readouterr().out.rstrip("\n"))
