"""Loads the tokenizer of a checkpoint folder or a GGUF file.

Invariant: no code of the folder is run. ``check_folder`` refuses folders that name code before transformers sees them;
``trust_remote_code=False`` keeps transformers from prompting on stdin. transformers is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapstream.models import gguf_architectures
from snapstream.models.chat_template import TemplateFault, check_template
from snapstream.models.config_json import MAX_TEMPLATE_BYTES, check_folder, read_object
from snapstream.models.gguf_header import Header, is_gguf, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a file that a tokenizer can be read from, or a GGUF file a vocabulary."""
    if is_gguf(folder):
        return read_header(folder).metadata.get(_KIND, _NO_VOCABULARY) not in (_NO_VOCABULARY, "none")
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. ValueError if there is none, it needs code, or one of its files is broken."""
    if is_gguf(folder):
        return _gguf_tokenizer(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a tokenizer is read from a checkpoint folder")
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    check_folder(folder)
    for name in JSON_FILES[:-1]:  # the last is large, and parsed here only if transformers fails
        if (folder / name).is_file():
            read_object(folder / name)
    _refuse_places(folder)
    from transformers import AutoTokenizer

    config = _light_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare exceptions, and panics that are no Exception
        raise ValueError(_reason(folder, error)) from error
    _check_settings(folder, tokenizer)
    return tokenizer


def find_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """As ``load_tokenizer``, but None if the folder has no tokenizer (token ids in, token ids out)."""
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def read_template(file: Path) -> str:
    """The chat template in a file; ValueError, with the line, for one that is broken."""
    try:
        size = file.stat().st_size
        text = file.read_text(encoding="utf-8") if size <= MAX_TEMPLATE_BYTES else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{file} has {size} bytes; a chat template may have {MAX_TEMPLATE_BYTES}")
    if not text.strip():
        raise ValueError(f"{file} is empty; it must be a chat template")
    try:
        check_template(text)
    except TemplateFault as fault:
        place = "" if fault.line is None else f", line {fault.line}"
        raise ValueError(f"{file}{place}: {fault}") from None
    return text


def _light_config(folder: Path) -> PreTrainedConfig | None:
    """What ``AutoTokenizer`` reads of ``config.json`` where ``tokenizer_config.json`` names a class: the model's type.

    The model's own configuration class imports torch.compile and torch.distributed, as long as torch itself. None
    where ``AutoTokenizer`` must read the configuration: it chooses a class from it.
    """
    files = folder / "tokenizer_config.json", folder / "config.json"
    if not all(file.is_file() for file in files):
        return None
    named, model = map(read_object, files)
    if not (isinstance(named.get("tokenizer_class"), str) and isinstance(model.get("model_type"), str)):
        return None
    from transformers import PreTrainedConfig

    config = PreTrainedConfig()
    for name in ("model_type", "model_name"):
        if name in model:
            setattr(config, name, model[name])
    return config


def _refuse_places(folder: Path) -> None:
    """ValueError if ``fast_tokenizer_files`` names a file outside the folder."""
    file = folder / "tokenizer_config.json"
    names = read_object(file).get("fast_tokenizer_files") if file.is_file() else None
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{file}: fast_tokenizer_files names {name!r}; it may name files of its own folder only")


def _check_settings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError for settings that transformers accepts and fails on with the first prompt."""
    file, template, longest = folder / "tokenizer_config.json", tokenizer.chat_template, tokenizer.model_max_length
    if template is not None and not isinstance(template, (str, dict)):
        raise ValueError(f"{file}: chat_template is {template!r}; it must be a string, or several by name")
    if not isinstance(longest, (int, float)):
        raise ValueError(f"{file}: model_max_length is {longest!r}; it must be a number")


def _reason(folder: Path, error: BaseException) -> str:
    """The reason for the error, with the broken file where it can be found."""
    file = folder / JSON_FILES[-1]
    if not file.is_file():
        return f"{folder}: its tokenizer cannot be read: {_first_line(error)}"
    try:
        read_object(file)
    except ValueError as broken:
        return str(broken)
    return f"{file} and tokenizer_config.json make no tokenizer: {_first_line(error)}"


# GGUF. A vocabulary is a list of tokens with their types; "gpt2" is byte-level BPE with a list of merges, "llama" is
# SentencePiece's BPE, whose merges follow from the scores of the tokens, and "gemma4" the same with a list of merges.

_KIND, _NO_VOCABULARY = "tokenizer.ggml.model", "no_vocab"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MAX_PIECE = 256  # characters of a SentencePiece token
_SPACE = "\u2581"

_ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(digits: str) -> str:
    """Words with the sign before them, groups of digits, punctuation with the line ends after it."""
    return rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDINGS}"


def _cased(suffix: str, digits: str, but: str = "", ends: str = r"[\r\n/]*") -> str:
    """The same, cut where capitals begin. ``but``: letters of another pattern."""
    upper, lower = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kind in (r"Lu}\p{Lt", "Ll"))
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{many}{suffix}" for many in (f"{upper}*{lower}+", f"{upper}+{lower}*"))
    return rf"{'|'.join(words)}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_ENDINGS}"


_DIGITS, _GPT2 = r"\p{N}", "gpt2"  # the last: the pattern of byte-level BPE
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _ENDINGS,
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGITS)
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN,
    r"\p{N}+",
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _cased(f"{_SUFFIXES}?", ""),
)
_SEED = (rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # from the right in threes
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK[2],
)
_RUNS = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))  # of spaces
# By tokenizer.ggml.pre: the patterns at which text is cut, one after the other.
_LLAMA3, _QWEN2, _GPT4 = (_words("{1,3}"),), (_words(""),), (_cased(f"{_SUFFIXES}?", "{1,3}"),)
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4)
_QWEN35 = (_QWEN2[0].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "glm4": _LLAMA3, "chatglm-bpe": _LLAMA3,
    "falcon3": _LLAMA3, "falcon-h1": _LLAMA3, "pixtral": _LLAMA3, "lfm2": _LLAMA3, "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3, "qwen35": _QWEN35, "starcoder": (_DIGITS, _GPT2), "refact": (_DIGITS, _GPT2), "seed-coder": _SEED,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "hunyuan": _QWEN2, "deepseek-v3": _DEEPSEEK, "gpt-2": (_GPT2,), "olmo": (_GPT2,), "smollm": (_DIGITS, _GPT2),
    "tekken": (_cased("", ""),), "gpt-4o": _GPT4, "minimax-m2": _GPT4, "youtu": _YOUTU,
    "kimi-k2": (r"\p{Han}+|" + _cased(f"{_SUFFIXES}?", "{1,3}", r"&&[^\p{Han}]", r"[\r\n]*"),),
    "deepseek-llm": _DEEPSEEK_LLM, "deepseek-coder": _DEEPSEEK_CODER, "hunyuan-dense": _DEEPSEEK,
    "command-r": (_DIGITS, _GPT2), "mellum2": (_DIGITS, _GPT2), "mellum": (_GPT2,), "exaone4": (_GPT2,),
    "glm5": _LLAMA3, "llama4": _GPT4, "solar-open": _QWEN2, "stablelm2": _QWEN2, "phi-2": (_GPT2,),
    "afmoe": _AFMOE, "laguna": (r"\n+", *_QWEN2), "cohere2moe": _AYA, "tiny_aya": _AYA,
    "bailingmoe2": (_QWEN2[0].replace(r"\s*[\r\n]+", r"\s*[\r\n]"),),
    "jais-2": (_LLAMA3[0].replace(r"\s+(?!\S)|\s+", rf"{_RUNS}|\s"),),
}  # fmt: skip
_BEGIN = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
# A piece that is a token is not merged from its letters.
_WHOLE_TOKENS = (*_BEGIN, "gpt-4o", "llama4", "glm4", "glm5", "youtu")
_NORMALIZED = ("qwen2", "qwen35", "command-r")  # to Unicode's NFC


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the metadata of a file. ValueError for a kind that is not supported, and a broken one."""
    header = gguf_architectures.open_model(file).header
    metadata = header.metadata
    kind = metadata.get(_KIND)
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ValueError(
            f"{file}: {_KIND} is {kind!r:.80}; known: 'gpt2' (byte-level BPE), 'llama' and 'gemma4' (SentencePiece BPE)"
        )
    tokens, types = header.texts("tokenizer.ggml.tokens"), header.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ValueError(f"{file}: the vocabulary has {len(tokens):,} tokens and {len(types):,} types")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and (not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES):
        raise ValueError(f"{file}: tokenizer.chat_template must be a text of at most {MAX_TEMPLATE_BYTES:,} bytes")
    special = {}
    for name, key in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise ValueError(f"{file}: {key}_token_id is {token!r:.80}; the vocabulary has {len(tokens):,} tokens")
        special[name] = tokens[token]
    try:
        own = _byte_level(header, tokens, types) if kind == "gpt2" else _sentence_pieces(header, tokens, types, special)
        _add_ends(own, header, special)
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=own, chat_template=template, clean_up_tokenization_spaces=False, **special
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare exceptions, and panics that are no Exception
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{file}: its vocabulary makes no tokenizer: {_first_line(error)}") from error


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(header: Header, tokens: Sequence[str], types: Sequence[float]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre: Any = header.metadata.get("tokenizer.ggml.pre")
    if pre not in PATTERNS:
        raise ValueError(f"{header.file}: tokenizer.ggml.pre is {pre!r:.80}; known: {', '.join(PATTERNS)}")
    vocabulary, merges = {token: at for at, token in enumerate(tokens)}, _stored_merges(header)
    own = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_TOKENS))
    if pre in _NORMALIZED:
        own.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in PATTERNS[pre] if one != _GPT2]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_GPT2 in PATTERNS[pre])
    own.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    own.decoder = decoders.ByteLevel()
    _add_tokens(own, tokens, types)
    return own


def _sentence_pieces(header: Header, tokens: Sequence[str], types: Sequence[float], special: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if header.metadata.get(f"tokenizer.ggml.{name}"):
            raise ValueError(f"{header.file}: tokenizer.ggml.{name} is not supported")
    vocabulary, has_merges = {token: at for at, token in enumerate(tokens)}, header.metadata[_KIND] == "gemma4"
    merges = _stored_merges(header) if has_merges else _merges_by_score(header, tokens, types)
    own = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=special.get("unk_token"), fuse_unk=True, byte_fallback=True)
    )
    has_prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", not has_merges)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    own.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    own.decoder = decoders.Sequence([*decoding, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    _add_tokens(own, tokens, types)
    return own


def _stored_merges(header: Header) -> list[tuple[str, str]]:
    merges: list[Any] = [tuple(merge.split(" ")) for merge in header.texts("tokenizer.ggml.merges")]
    wrong = [merge for merge in merges if len(merge) != 2]
    if wrong:
        raise ValueError(f"{header.file}: {' '.join(wrong[0])[:80]!r} in tokenizer.ggml.merges is not two tokens")
    return merges


def _merges_by_score(header: Header, tokens: Sequence[str], types: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token; first what makes the one with the highest score."""
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(f"{header.file}: the vocabulary has {len(tokens):,} tokens and {len(scores):,} scores")
    usable = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    longest = max(map(len, usable), default=0)
    if longest > _MAX_PIECE:
        raise ValueError(f"{header.file}: a token has {longest:,} characters; the limit is {_MAX_PIECE}")
    found = [
        (-score, len(token) - at, token[:at], token[at:])
        for token, score in usable.items()
        for at in range(1, len(token))
        if token[:at] in usable and token[at:] in usable
    ]
    return [(left, right) for _, _, left, right in sorted(found)]


def _add_tokens(own: Any, tokens: Sequence[str], types: Sequence[float]) -> None:
    """Tokens that are found in a text before it is cut."""
    from tokenizers import AddedToken

    named = list(zip(tokens, types, strict=True))
    own.add_special_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _CONTROL])
    own.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _USER_DEFINED])


def _add_ends(own: Any, header: Header, special: Mapping[str, str]) -> None:
    """Begin and end token around a text, where the metadata says so."""
    from tokenizers import processors

    metadata = header.metadata
    by_default = metadata[_KIND] in ("llama", "gemma4") or metadata.get("tokenizer.ggml.pre") in _BEGIN
    first = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", by_default) else None
    last = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return
    ends = [token for token in (first, last) if token is not None]
    one, two = ([*([f"{first}:{n}"] if first else []), f"${name}:{n}", *([f"{last}:{n}"] if last else [])]
                for n, name in enumerate("AB"))  # fmt: skip
    own.post_processor = processors.TemplateProcessing(
        single=one, pair=[*one, *two], special_tokens=[(token, own.token_to_id(token)) for token in dict.fromkeys(ends)]
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
