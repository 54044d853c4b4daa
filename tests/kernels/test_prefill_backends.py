"""The choice of a prefill kernel: by a trial, by name, past kernels that are missing, raise or are wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from snapstream.config import PrefillAttentionName
from snapstream.kernels import pytorch, reference
from snapstream.kernels.backends import autotune
from snapstream.kernels.backends import prefill as packages
from snapstream.kernels.backends.autotune import choose
from snapstream.kernels.backends.prefill import VERSIONS, Case, PackedLens, Version
from snapstream.kernels.cpu.looped import library

CPU = Case.of(torch.device("cpu"), torch.float32, 16, 2)
HOPPER = Case(torch.device("cuda"), torch.bfloat16, 128, 4, (9, 0))


def packed_by_reference(q: Tensor, k: Tensor, v: Tensor, lens: Any, *, window: int | None = None) -> Tensor:
    queries, keys = lens.queries.tolist(), lens.keys.tolist()
    return torch.cat([
        reference.prefill_attention(q[a:b], k[:, c:d], v[:, c:d], window=window)
        for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False)
    ])  # fmt: skip


def top_left(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """Aligns the mask with the first key: the mistake that old flash kernels make."""
    return reference.prefill_attention(q, k[:, : len(q)], v[:, : len(q)], window=window)


def windowless(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    return reference.prefill_attention(q, k, v)


def broken(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Version]:
    """Trials run on the CPU and take no time, and the kernels are those that the test puts into the returned table."""
    versions: dict[str, Version] = {}
    original = autotune.random_chunk
    monkeypatch.setattr(
        autotune, "random_chunk", lambda case, *n: original(replace(case, device=torch.device("cpu")), *n)
    )
    monkeypatch.setattr(autotune, "seconds", lambda version, case: 1.0)
    monkeypatch.setattr(autotune, "known", dict)
    monkeypatch.setattr(autotune, "VERSIONS", versions)
    monkeypatch.setattr(autotune, "ORDER", ("a", "b", "c"))
    monkeypatch.setattr(autotune, "PACKED_ORDER", ("b", "c"))
    return versions


def test_a_cpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "seconds_on_a_cpu", lambda version, case: 1.0)
    monkeypatch.setattr(autotune, "known", dict)
    monkeypatch.setattr(library, "load", lambda: object())
    chosen = choose("auto", CPU)
    assert (chosen.name, chosen.packed_name) == ("cpu", "loop")
    assert chosen.describe() == (
        "prefill attention: cpu (timed at this start: cpu 1000.00 ms, cpu_fp32 1000.00 ms); "
        "short prompts that share a chunk: a call per prompt"
    )
    assert choose("reference", CPU).attend is reference.prefill_attention


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_versions_of_a_cpu_equal_the_reference(name: str) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(9, 4, 16), torch.randn(2, 2, 30, 16)
    got = choose(name, CPU).attend(q, k, v)
    torch.testing.assert_close(got, reference.prefill_attention(q, k, v), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        autotune.automatic(CPU).attend(q, k, v),
        got,
        rtol=1e-5,
        atol=1e-5,
    )


def test_names_are_those_of_the_settings() -> None:
    assert set(get_args(PrefillAttentionName)) == {"auto", *VERSIONS}
    with pytest.raises(ValueError, match="prefill_attention is 'quick'; it must be auto or one of reference, cpu"):
        choose("quick", CPU)


def test_a_kernel_asked_for_by_name_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="'sdpa_flash' cannot be used: needs an NVIDIA GPU, and the device is cpu"):
        choose("sdpa_flash", CPU)
    with pytest.raises(ValueError, match="runs on a CPU, and the device is cuda"):
        choose("cpu", HOPPER)


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("flash_attn", HOPPER, "needs the package flash_attn, which is not installed"),
        ("sdpa_flash", replace(HOPPER, dtype=torch.float32), "takes bfloat16 and float16, not float32"),
        ("sdpa_flash", replace(HOPPER, capability=(7, 5)), "needs compute capability 8.0 or newer; this GPU has 7.5"),
        ("sdpa_cudnn", replace(HOPPER, head_dim=192), "a multiple of 8 up to 128; this model's is 192"),
        ("sdpa_flash", replace(HOPPER, head_dim=20), "a multiple of 8 up to 256; this model's is 20"),
        ("sdpa_efficient", replace(HOPPER, dtype=torch.float32), ""),
        ("sdpa_flash", HOPPER, ""),
    ],
)
def test_what_a_kernel_needs(name: str, case: Case, reason: str) -> None:
    found = VERSIONS[name].why_not(case)
    assert reason in found and bool(reason) == bool(found)


def test_packages_ask_for_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert VERSIONS["flash_attn_3"].why_not(HOPPER) == ""
    assert "needs compute capability 9.x; this GPU has 10.0" in VERSIONS["flash_attn_3"].why_not(
        replace(HOPPER, capability=(10, 0))
    )


def test_the_first_of_the_order_that_serves(gpu: dict[str, Version]) -> None:
    gpu["a"] = Version("a", reference.prefill_attention, lambda case: "needs more")
    gpu["b"] = Version("b", reference.prefill_attention, lambda case: "")
    gpu["c"] = Version("c", reference.prefill_attention, lambda case: "", packed_by_reference)
    chosen = choose("auto", HOPPER)
    assert (chosen.name, chosen.packed_name) == ("b", "c")
    assert "timed at this start: b 1000.00 ms, c 1000.00 ms; a needs more)" in chosen.describe()
    assert chosen.describe().endswith("short prompts that share a chunk: one call (c)")


@pytest.mark.parametrize(("attend", "reason"), [(top_left, "wrong by"), (broken, "no kernel image is available")])
def test_a_kernel_that_fails_its_trial_is_passed_over(attend: Any, reason: str, gpu: dict[str, Version]) -> None:
    gpu["a"] = Version("a", attend, lambda case: "")
    gpu["b"] = Version("b", reference.prefill_attention, lambda case: "")
    gpu["c"] = gpu["b"]
    chosen = choose("auto", HOPPER)
    assert chosen.name == "b" and reason in chosen.why
    with pytest.raises(ValueError, match=f"'a' cannot be used: failed its trial .*{reason}"):
        choose("a", HOPPER)
    gpu["b"] = gpu["c"] = gpu["a"]
    with pytest.raises(ValueError, match="no prefill attention can serve here: a failed its trial"):
        choose("auto", HOPPER)


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({"a": 1.0, "b": 0.5, "c": 0.7}, "b"),
        ({"a": 1.0, "b": 0.95, "c": 0.91}, "a"),  # not by a tenth: the order stays
        ({"a": float("inf"), "b": 0.95, "c": 2.0}, "b"),
    ],
)
def test_those_that_serve_run_for_time(
    times: dict[str, float], name: str, gpu: dict[str, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(version: Version, case: Case) -> float:
        if times[version.name] == float("inf"):
            raise RuntimeError("out of memory")
        return times[version.name]

    monkeypatch.setattr(autotune, "seconds", seconds)
    for key in times:
        gpu[key] = Version(key, reference.prefill_attention, lambda case: "")
    chosen = choose("auto", HOPPER)
    assert chosen.name == name
    assert f"b {times['b'] * 1e3:.2f} ms" in chosen.why


def test_a_race_is_run_once_and_without_those_that_cannot_serve(
    gpu: dict[str, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: autotune.Known = {}
    ran: list[str] = []
    monkeypatch.setattr(autotune, "known", lambda: measured)
    monkeypatch.setattr(autotune, "seconds", lambda version, case: ran.append(version.name) or float(len(ran) == 1))
    gpu["a"] = Version("a", reference.prefill_attention, lambda case: "")
    gpu["b"] = Version("b", broken, lambda case: "")
    gpu["c"] = Version("c", reference.prefill_attention, lambda case: "")
    assert [choose("auto", HOPPER).name for _ in range(2)] == ["c", "c"] and ran == ["a", "c"]
    choose("auto", replace(HOPPER, group_size=1))
    assert ran == ["a", "c", "a", "c"]  # another shape is another question


def test_the_reference_runs_no_race(gpu: dict[str, Version], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a matrix of scores; it serves where nothing else does."""
    monkeypatch.setattr(autotune, "ORDER", ("a", "reference"))
    monkeypatch.setattr(autotune, "PACKED_ORDER", ())
    monkeypatch.setattr(autotune, "seconds", lambda version, case: pytest.fail("a race of one"))
    gpu["reference"] = VERSIONS["reference"]
    gpu["a"] = Version("a", reference.prefill_attention, lambda case: "")
    assert choose("auto", HOPPER).name == "a"
    gpu["a"] = Version("a", broken, lambda case: "")
    assert choose("auto", HOPPER).name == "reference"


def test_only_a_model_with_windows_asks_a_kernel_for_them(gpu: dict[str, Version]) -> None:
    def whole(q: Tensor, k: Tensor, v: Tensor, lens: Any, *, window: int | None = None) -> Tensor:
        return packed_by_reference(q, k, v, lens)

    gpu["a"] = gpu["c"] = Version("a", windowless, lambda case: "", whole)
    gpu["b"] = Version("b", reference.prefill_attention, lambda case: "", packed_by_reference)
    assert (choose("auto", HOPPER).name, choose("a", HOPPER).packed_name) == ("a", "a")
    windowed = replace(HOPPER, window=4096)
    assert (choose("auto", windowed).name, choose("auto", windowed).packed_name) == ("b", "b")
    with pytest.raises(ValueError, match="'a' cannot be used: failed its trial .wrong by"):
        choose("a", windowed)


def test_a_model_with_a_cap_asks_a_kernel_for_it(gpu: dict[str, Version]) -> None:
    gpu["a"] = gpu["c"] = Version("a", windowless, lambda case: "", packed_by_reference)
    gpu["b"] = Version("b", reference.prefill_attention, lambda case: "")
    capped = replace(HOPPER, cap=50.0)
    assert (choose("auto", HOPPER).name, choose("auto", capped).name) == ("a", "b")
    assert choose("auto", capped).packed_name == "loop"
    with pytest.raises(ValueError, match="'a' cannot be used: failed its trial"):
        choose("a", capped)


def test_a_packed_kernel_that_fails_its_trial_is_not_used(gpu: dict[str, Version]) -> None:
    def mixes(q: Tensor, k: Tensor, v: Tensor, lens: Any, *, window: int | None = None) -> Tensor:
        return reference.prefill_attention(q, k, v)  # one prompt sees the other

    for name in ("a", "b", "c"):
        gpu[name] = Version(name, reference.prefill_attention, lambda case: "", mixes)
    assert choose("auto", HOPPER).packed_name == "loop"
    gpu["c"] = replace(gpu["c"], attend_packed=packed_by_reference)
    assert choose("auto", HOPPER).packed_name == "c"
    gpu["c"] = replace(gpu["c"], why_not_packed=lambda: "too old")
    assert choose("auto", HOPPER).packed_name == "loop"


def test_by_name_packs_with_that_kernel_or_not_at_all(gpu: dict[str, Version]) -> None:
    gpu["b"] = Version("b", reference.prefill_attention, lambda case: "")
    gpu["c"] = Version("c", reference.prefill_attention, lambda case: "", packed_by_reference)
    assert choose("b", HOPPER).packed_name == "loop"
    assert choose("c", HOPPER).packed_name == "c"


def test_the_orders() -> None:
    assert set(autotune.ORDER) | set(autotune.PACKED_ORDER) <= set(VERSIONS) and autotune.ORDER[-1] == "reference"
    assert all(VERSIONS[name].attend_packed for name in autotune.PACKED_ORDER)


# Adapters of optional packages: stand-ins check arguments and layout, and answer through the reference.

HEADS, KV_HEADS, SIZE = 4, 2, 16


def inputs(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    pool = torch.randn(2, KV_HEADS, num_keys + 9, SIZE)
    k, v = pool[:, :, 5 : 5 + num_keys]  # as a range of the staging buffers
    return torch.randn(num_queries, HEADS, SIZE), k, v


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.stride(-1) == 1


def attend_parts(
    q: Tensor, k: Tensor, v: Tensor, ends_q: list[int], ends_k: list[int], window: int | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Packed attention by the reference; ``k, v [N, G, E]`` as the packages take them."""
    parts = [
        reference.prefill_attention(q[a:b], k[c:d].transpose(0, 1), v[c:d].transpose(0, 1), window=window, cap=cap)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    ]
    return torch.cat(parts)


def window_of(left: int) -> int | None:
    """Of what packages take: how many keys are seen before a query's own, or -1."""
    return None if left == -1 else left + 1


class Stand:
    """What the packages would be; every method insists on names and shapes of the real one."""

    def __init__(self, pool: Tensor, *, is_third: bool = False) -> None:
        self.pool, self.is_third, self.calls = pool, is_third, 0
        self.cap: float | None = None

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        self.calls += 1
        window = window_of(window_size[0])
        assert window_size[1] == (-1 if window is None else 0)
        assert causal and q.shape[0] == k.shape[0] == 1
        assert q.shape[2:] == (HEADS, SIZE) and k.shape[2:] == v.shape[2:] == (KV_HEADS, SIZE)
        assert is_same_memory(k, self.pool) and is_same_memory(v, self.pool)
        own = q[0], k[0].transpose(0, 1), v[0].transpose(0, 1)
        out = reference.prefill_attention(*own, window=window, cap=softcap or None)[None]
        return (out, None) if self.is_third else out

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, causal: bool, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        self.cap = softcap or None
        out = self.varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               window_size=(window_size[0], 0 if causal else -1), enable_gqa=True)  # fmt: skip
        return (out, None) if self.is_third else out

    def varlen_attn(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        assert window_size[1] == 0 and enable_gqa
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert query.shape[1:] == (HEADS, SIZE) and key.shape[1:] == (KV_HEADS, SIZE)
        assert is_same_memory(key, self.pool) and is_same_memory(value, self.pool)
        ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
        assert (ends_q[-1], ends_k[-1]) == (len(query), len(key))
        assert max_q == max(b - a for a, b in zip(ends_q, ends_q[1:], strict=False))
        assert max_k == max(b - a for a, b in zip(ends_k, ends_k[1:], strict=False))
        return attend_parts(query, key, value, ends_q, ends_k, window_of(window_size[0]), self.cap)

    def install(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        module: Any = ModuleType(name)
        for function in ("flash_attn_func", "flash_attn_varlen_func", "varlen_attn"):
            setattr(module, function, getattr(self, function))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("name", "module"),
    [("flash_attn", "flash_attn"), ("flash_attn_3", "flash_attn_interface")],
)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (7, 40), (40, 40)])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (9, None), (50, None), (None, 0.7), (9, 0.7)])
def test_one_prompt(
    name: str, module: str, num_queries: int, num_keys: int, window: int | None, cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, v = inputs(num_queries, num_keys)
    stand = Stand(k, is_third=name == "flash_attn_3")
    stand.install(monkeypatch, module)
    got = VERSIONS[name].attend(q, k, v, window=window, cap=cap)
    assert stand.calls == 1
    assert torch.equal(got, reference.prefill_attention(q, k, v, window=window, cap=cap))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("flash_attn", "flash_attn"),
        ("flash_attn_3", "flash_attn_interface"),
        ("sdpa_flash", "torch.nn.attention.varlen"),
    ],
)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (9, None), (50, None), (None, 0.7), (9, 0.7)])
def test_packed_prompts(
    name: str, module: str, window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts; of the first, only the last 3 tokens are queries."""
    q, k, v = inputs(20, 29)
    stand = Stand(k, is_third=name == "flash_attn_3")
    stand.install(monkeypatch, module)
    lens = PackedLens(
        torch.tensor([0, 3, 8, 20], dtype=torch.int32), torch.tensor([0, 12, 17, 29], dtype=torch.int32), 12, 12
    )
    attend = VERSIONS[name].attend_packed
    assert attend is not None
    if name == "sdpa_flash" and cap is not None:
        with pytest.raises(ValueError, match="varlen_attn of PyTorch has no cap of scores"):
            attend(q, k, v, lens, window=window, cap=cap)
        return
    got = attend(q, k, v, lens, window=window, cap=cap)
    assert stand.calls == 1
    expected = attend_parts(q, k.transpose(0, 1), v.transpose(0, 1), [0, 3, 8, 20], [0, 12, 17, 29], window, cap)
    assert torch.equal(got, expected)


def test_varlen_of_a_pytorch_that_takes_grouped_heads_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 has no word for them, and its kernel needs none."""
    q, k, v = inputs(8, 8)
    stand = Stand(k)

    def of_2_11(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
        return stand.varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size,
                                 enable_gqa=True)  # fmt: skip

    monkeypatch.setattr(packages, "import_module", lambda name: SimpleNamespace(varlen_attn=of_2_11))
    assert packages.why_no_torch_varlen() == ""
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    got = packages.torch_varlen(q, k, v, PackedLens(ends, ends, 5, 5))
    assert torch.equal(got, attend_parts(q, k.transpose(0, 1), v.transpose(0, 1), [0, 3, 8], [0, 3, 8]))


def test_varlen_of_an_older_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.why_no_torch_varlen() == ""  # the one installed here

    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
              is_causal: bool = False) -> None: ...  # fmt: skip

    monkeypatch.setattr(packages, "import_module", lambda name: SimpleNamespace(varlen_attn=older))
    assert "has no window_size" in packages.why_no_torch_varlen()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 40), (7, 40), (40, 40)])
@pytest.mark.parametrize("num_heads", [2, 4, 6])
def test_efficient_kernel(num_queries: int, num_keys: int, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in insists on equal numbers of heads and pads its log-sum-exp, as the real one does."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: None, wants_lse: bool, dropout: float, causal: bool) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1] and wants_lse and dropout == 0.0 and bias is None
        assert not causal or q.shape[2] == k.shape[2]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))

    monkeypatch.setattr(pytorch, "efficient_operator", kernel)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(num_queries, num_heads, SIZE), torch.randn(2, KV_HEADS, num_keys, SIZE)
    torch.testing.assert_close(
        pytorch.attend_by(pytorch.efficient, q, k, v), reference.prefill_attention(q, k, v), rtol=1e-5, atol=1e-5
    )
