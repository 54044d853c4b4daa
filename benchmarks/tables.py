"""Markdown of stored results, for README.md and docs; ``python -m figures`` puts it there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.machine import RESULTS
from figures.markdown import link, table

HYBRIDS = (
    "peers_all_lfm2-100m", "peers_all_lfm2-100m_avx2", "peers_all_qwen3.5-100m", "peers_all_granite-h-100m",
)  # fmt: skip
DEEP = (
    "peers_all_lfm2-100m_4096_avx2", "peers_all_lfm2-100m_4096_8rows_avx2", "peers_all_qwen3.5-100m_4096_avx2",
    "peers_all_lfm2-100m_4096", "peers_all_qwen3.5-100m_4096", "peers_all_granite-h-100m_4096",
    "peers_all_qwen3.5-100m_4096_8rows", "peers_all_lfm2-100m_32768",
)  # fmt: skip
ENGINES = ("peers_all_100m", "peers_all_100m_avx2", "peers_all_100m_intel", *HYBRIDS, *DEEP)
FILES = (
    "peers_llama_bench_avx2", "peers_llama_bench_avx2_intel", "peers_llama_bench_intel", "peers_llama_bench_amd",
    "peers_llama_bench_depths_amd", "peers_llama_bench_depths_intel", "peers_llama_bench_k_quants",
    "peers_llama_bench_iq", "peers_llama_bench_lfm2_amd",
    "peers_llama_bench_mixture_avx2", "peers_llama_bench_mixture_intel", "peers_llama_bench_gpt_oss_intel",
)  # fmt: skip
LADDERS = ("looping_amd", "looping_avx2", "looping_intel")
# Where a result is not called as its benchmark.
COMMANDS = (
    dict.fromkeys(ENGINES, "peers") | dict.fromkeys(FILES, "peers.llama_bench") | dict.fromkeys(LADDERS, "looping")
)


RUNGS = ("B0", "B1", "B2", "B3")  # B3, in older records: the next stage's weights prefetched before each barrier


def newest(name: str) -> tuple[Path, dict[str, Any]]:
    """The latest stored result of that name; file names begin with their date."""
    found = sorted((RESULTS / "cpu").glob(f"????-??-??_{name}.json"))
    if not found:
        raise ValueError(f"not measured; run python -m benchmarks.{COMMANDS.get(name, name)} --save")
    return found[-1], json.loads(found[-1].read_text())


def looping(figures: dict[str, Any]) -> str:
    """The ladder at the shortest context, B2 at the others, and ablations in words."""
    shortest = min(arm["context"] for arm in figures["arms"])
    rungs = [rung for rung in RUNGS if rung in figures["arms"][0]]
    rows = [
        [arm["shape"], arm["width"], str(arm["batch"]), *(f"{arm[rung]['p10_ms']:.3g}" for rung in rungs),
         f"{arm['read_gb_per_s']:.0f}", f"{arm['B2']['of_bandwidth']:.0%}", f"{arm['B2']['times_bound']:.2f}"]
        for arm in figures["arms"] if arm["context"] == shortest
    ]  # fmt: skip
    heads = ["shape", "weights", "rows", *(f"{rung}, ms" for rung in rungs), "read, GB/s", "B2, of it",
             "B2 over its bound"]  # fmt: skip
    waiting, ablations = figures["ablations"], figures["ablations"]
    by_threads = ", ".join(
        f"{arm['threads']} at batch {arm['batch']}: {arm['p10_ms']:.3g} ms" for arm in ablations["threads"]
    )
    by_touch = ", ".join(f"{arm['touched']}: {arm['p10_ms']:.3g} ms" for arm in ablations.get("touched", ()))
    touched = f"Touched ahead at batch 1: {by_touch}. " if by_touch else ""
    head = (
        f"A decode step in more and more of one piece, rows of {shortest:,} slots, {figures['threads']} threads, "
        f"{figures['instructions']}; tenth percentiles:"
    )
    words = (
        f"Shape {ablations['shape']} in bfloat16, B2. Threads: {by_threads}. {touched}A "
        f"barrier takes {waiting['barrier_us']:.2f} µs, a call {waiting['call_us']:.1f} µs, one after threads fell "
        f"asleep {waiting['call_after_sleep_us']:.0f} µs."
    )
    return f"{head}\n\n{table(heads, rows)}\n\n{_longer(figures, shortest)}{words}"


def _longer(figures: dict[str, Any], shortest: int) -> str:
    """B2 at other contexts: a line for shape, weights and slots."""
    batches = sorted({arm["batch"] for arm in figures["arms"]})
    lines: dict[tuple[str, str, int], dict[int, str]] = {}
    for arm in figures["arms"]:
        if arm["context"] > shortest:
            own = arm["B2"]
            lines.setdefault((arm["shape"], arm["width"], arm["context"]), {})[arm["batch"]] = (
                f"{own['p10_ms']:.3g} ms, {own['of_bandwidth']:.0%}, {own['times_bound']:.2f}"
            )
    if not lines:
        return ""
    rows = [
        [shape, width, f"{slots:,}", *(own.get(batch, "") for batch in batches)]
        for (shape, width, slots), own in lines.items()
    ]
    heads = ["shape", "weights", "slots", *(f"{batch} row{'s' * (batch > 1)}" for batch in batches)]
    return f"B2 over longer rows: time, share of the read rate, times its bound:\n\n{table(heads, rows)}\n\n"


def looping_rows(figures: dict[str, Any]) -> str:
    """Kinds of rows side by side, each against fp32 ones."""
    rows = [
        [arm["shape"], arm["width"], str(arm["batch"]), f"{arm['context']:,}", kind, f"{own['mb']:,.0f}",
         f"{own['p10_ms']:.3g}", f"{own['p10_ms'] / arm['rows']['float32']['p10_ms']:.2f}",
         f"{arm['read_gb_per_s']:.0f}", f"{own['times_bound']:.2f}"]
        for arm in figures["arms"] for kind, own in arm["rows"].items()
    ]  # fmt: skip
    heads = ["shape", "weights", "rows", "slots", "kind of rows", "MB a step", "step, ms", "against fp32 rows",
             "read, GB/s", "over its bound"]  # fmt: skip
    return (
        f"A looped step over rows of four kinds, {figures['threads']} threads, {figures['instructions']}; tenth "
        f"percentiles:\n\n{table(heads, rows)}"
    )


def equal_memory(figures: dict[str, Any]) -> str:
    """Few full rows against many small ones."""
    rows = [
        [arm["budget"], str(arm["rows"]), f"{arm['row_mib']:.0f} MiB", f"{arm['all_mib']:.0f} MiB",
         f"{arm['step_ms']:.1f} ms", f"{arm['tokens_per_s']:.1f}", f"{arm['speedup']:.2f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["row", "rows", "a row", "all rows", "step", "tokens/s", "against full rows"]
    return f"Decode after {figures['prompt_len']:,}-token prompts, the same bytes of rows:\n\n{table(heads, rows)}"


def sampling(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['vocabulary']:,}", str(arm["rows"]), arm["sampling"], f"{arm['torch']['median_ms']:.3g} ms",
         str(arm["torch"]["threads"]), f"{arm['native']['median_ms']:.2g} ms", f"{arm['speedup']:.0f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["vocabulary", "rows", "sampling", "PyTorch", "its threads", "native", "faster"]
    return f"The draw of a step alone, {figures['threads']} threads, {figures['instructions']} (medians):\n\n" + table(
        heads, rows
    )


def ray_scale(figures: dict[str, Any]) -> str:
    """``snapstream serve`` beside one and two replicas, and what Ray adds to a token."""
    rows = [
        [name, f"{arm['requests_per_s']:.1f}", f"{arm['tokens_per_s']:,.0f}", f"{arm['first_token_ms']:.1f} ms",
         f"{arm['token_us_alone']:,.0f} µs", f"{arm['token_us_together']:,.0f} µs"]
        for name, arm in figures["arms"].items()
    ]  # fmt: skip
    heads = ["", "requests/s", "tokens/s", "first token, alone", "a token, one stream", "a token, all streams"]
    size = f"{figures['streams']} streams of {figures['max_tokens']} tokens after {figures['prompt_len']}-token prompts"
    added = (
        f"Ray adds {figures['ray_us_per_token_alone']:,.0f} µs to a token of a stream alone, "
        f"{figures['ray_us_per_token_together']:,.0f} µs to one of {figures['streams']} streams, and "
        f"{figures['ray_first_token_ms']:.0f} ms to the first. Two replicas answer "
        f"{figures['second_replica_throughput_ratio']:.2f} times as many requests as one: they share "
        f"{figures['cores']} cores."
    )
    return f"{size}:\n\n{table(heads, rows)}\n\n{added}"


def ray_soak(figures: dict[str, Any]) -> str:
    """What became of the requests of a soak in which engines, replicas and ingresses were killed."""
    outcomes = dict(figures["outcomes"])
    killed = ", ".join(f"{kind}s {count}" for kind, count in figures["kills"].items() if kind != "put off")
    rows = [
        ["right, compared with the engine alone", f"{outcomes.pop('right', 0):,}"],
        ["cancelled by the client", f"{outcomes.pop('cancelled', 0):,}"],
        ["repeated on another replica, unseen by the client", f"{figures['repeated']:,}"],
        *([name, f"{count:,}"] for name, count in outcomes.items()),
        ["wrong, lost, or a row still taken", f"{len(figures['failures']):,}"],
    ]
    size = f"{figures['seconds'] / 60:.0f} minutes, {figures['clients']} clients, {figures['replicas']} replicas of "
    size += f"{figures['max_rows']} rows; killed: {killed}"
    return f"{size}:\n\n{table(['', ''], rows)}"


def decode(figures: dict[str, Any]) -> str:
    rows = []
    for arm in figures["arms"]:
        against = (
            f"{arm['speedup']:.2f}x | {arm['predicted']:.2f}x | {arm['measured_over_predicted']:.2f}"
            if "speedup" in arm
            else "1 | 1 | "
        )
        rows.append([arm["budget"], f"{arm['slots']:,}", f"{arm['tokens_per_s']:.1f}", *against.split(" | ")])
    heads = ["cache", "slots", "tokens/s", "faster", "as the bytes predict", "ratio"]
    return f"Decode of {figures['rows']} rows after a {figures['prompt_len']:,}-token prompt:\n\n" + table(heads, rows)


def prefill(figures: dict[str, Any]) -> str:
    named = ["attention"] if all("attention" in arm for arm in figures["arms"]) else []
    rows = [
        [f"{arm['prompt_len']:,}", f"{arm['slots']:,}", arm["weights"], arm["multiplies"], *(arm[own] for own in named),
         f"{arm['tokens_per_s']:,.0f}", f"{arm['compress_share']:.2%}"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["prompt", "slots", "weights", "products of", *named, "tokens/s", "scoring + selection + write"]
    return "How fast a prompt is read, and what compression adds:\n\n" + table(heads, rows)


def speculation(figures: dict[str, Any]) -> str:
    rows = [
        [arm["weights"], str(arm["rows"]), f"{arm['plain_tokens_per_s']:.0f}", f"{arm['edit_speedup']:.2f}x",
         f"{arm['edit_accepted_share']:.0%}", f"{arm['fresh_speedup']:.2f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = [
        "weights",
        "rows",
        "tokens/s without drafts",
        "edit of a text",
        "drafts accepted",
        "text that does not repeat",
    ]
    return f"Decode with drafts against without, {figures['model']}:\n\n" + table(heads, rows)


def draft_model(figures: dict[str, Any]) -> str:
    rows = [
        [arm["weights"], str(arm["rows"]), f"{arm['plain_tokens_per_s']:.0f}", f"{arm['right_speedup']:.2f}x",
         f"{arm['right_accepted_share']:.0%}", f"{arm['wrong_speedup']:.2f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["weights", "rows", "tokens/s without drafts", "right draft model", "drafts accepted", "wrong draft model"]
    return f"Decode with a draft model against without, {figures['model']}:\n\n" + table(heads, rows)


def prediction(figures: dict[str, Any]) -> str:
    rows = [
        [arm["weights"], str(arm["rows"]), f"{arm['plain_tokens_per_s']:.1f}",
         *(f"{own['speedup']:.2f}x" for own in arm["right"].values())]
        for arm in figures["arms"]
    ]  # fmt: skip
    shares = [f"{float(share):.0%} of drafts right" for share in figures["arms"][0]["right"]]
    heads = ["weights", "rows", "tokens/s without drafts", *shares]
    return f"Decode with a prediction layer against without, {figures['model']}:\n\n" + table(heads, rows)


def schema_drafts(figures: dict[str, Any]) -> str:
    rows = [
        [arm["weights"], str(arm["rows"]),
         *(text for name in ("long", "free") for text in (
             f"{arm[f'{name}_plain_tokens_per_s']:.0f}", f"{arm[f'{name}_speedup']:.2f}x",
             f"{arm[f'{name}_accepted_share']:.0%}"))]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = [
        "weights", "rows", "long names: tokens/s without drafts", "with", "drafts accepted",
        "free strings: tokens/s without drafts", "with", "drafts accepted",
    ]  # fmt: skip
    return f"JSON under a schema with drafts against without, {figures['model']}:\n\n" + table(heads, rows)


def memory(figures: dict[str, Any]) -> str:
    rows = [
        [str(arm["layers"]), f"{arm['measured_mib']:.0f} MiB", f"{arm['planned_mib']:.0f} MiB",
         f"{arm['measured_over_planned']:.2f}", f"{arm['chunk_major_staging_mib']:,.0f} MiB"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["layers", "measured peak", "`plan` says", "ratio", "K and V of all layers"]
    return f"Memory that a {figures['prompt_len']:,}-token prefill needs in addition to weights and row:\n\n" + table(
        heads, rows
    )


def peers(figures: dict[str, Any]) -> str:
    rows = []
    for arm in figures["arms"]:
        same = f"{arm['same_tokens']:.1%}" if "same_tokens" in arm else ""
        rows.append(
            [
                arm["engine"].replace("plain calls", "eager"),
                f"{arm['output_tokens_per_s']:,.0f}",
                f"{arm['speedup']:.2f}x",
                same,
            ]
        )
    size = f"{figures['rows']} prompts of {figures['prompt_len']:,} tokens, {figures['new_tokens']} new tokens each"
    heads = ["engine", "output tokens/s, prefill included", "speed-up", "same greedy tokens"]
    return f"{size}:\n\n" + table(heads, rows)


def peers_batches(figures: dict[str, Any]) -> str:
    rows = [
        [str(arm["rows"]), f"{theirs['output_tokens_per_s']:,.0f}", f"{arm['output_tokens_per_s']:,.0f}",
         f"{arm['speedup']:.2f}x", f"{arm['same_tokens']:.1%}"]
        for theirs, arm in zip(figures["arms"][::2], figures["arms"][1::2], strict=True)
    ]  # fmt: skip
    size = f"{figures['prompt_len']:,} tokens of prompt, {figures['new_tokens']} new tokens, full cache"
    heads = ["rows", "transformers generate, tokens/s", "snapstream, tokens/s", "speed-up", "same greedy tokens"]
    return f"{size}:\n\n" + table(heads, rows)


def peers_all(figures: dict[str, Any]) -> str:
    """Engines line by line, batches side by side: decode alone, then prefill and decode."""
    batches = sorted({line["batch"] for line in figures["arms"]})
    engines = dict.fromkeys(line["engine"] for line in figures["arms"])
    found = {(line["engine"], line["batch"]): line for line in figures["arms"]}
    parts = [
        f"{figures['prompt_len']} tokens of prompt, {figures['new_tokens']} new tokens, full cache, "
        f"{figures['threads']} threads; tokens per second of all rows:"
    ]
    shares = {line["engine"]: f"{line['read_share']:.0%}" for line in figures["arms"] if "read_share" in line}
    for title, name in (("decode alone", "decode_tokens_per_s"), ("prefill and decode", "output_tokens_per_s")):
        rows = [[engine, *(_rate(found.get((engine, batch), {}).get(name)) for batch in batches)] for engine in engines]
        heads = [title, *(f"batch {batch}" for batch in batches)]
        if shares and name == "decode_tokens_per_s":
            heads.append("of the read rate, batch 1")
            rows = [[*row, shares.get(row[0], "")] for row in rows]
        parts.append(table(heads, rows))
    parts += [f"Left out: {name} ({reason})." for name, reason in figures["left_out"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    return "\n\n".join([*parts, f"Versions: {versions}."])


def llama_bench(figures: dict[str, Any]) -> str:
    """``snapstream bench`` and its peers over the same file: means of the repetitions; a ratio is to the best peer."""
    names = {"llama_cpp": "llama.cpp", "ik_llama_cpp": "ik_llama.cpp"}
    peers = [peer for peer in names if peer in figures["models"][0]]
    rows = []
    for model in figures["models"]:
        own = model["snapstream"]
        file = f"{model['shape']} {model['kind']}, {model['file_bytes'] / 1e9:.2f} GB"
        for test in own["tokens_per_s"]:
            mine, *others = (mean(model[engine]["tokens_per_s"][test]) for engine in ("snapstream", *peers))
            share = f"{own['read_share'][test]:.0%}" if test in own["read_share"] else ""
            rates = [f"{rate:,.1f}" for rate in (*others, mine)]
            rows.append([file, test, *rates, f"{mine / max(others):.2f}x", share])
            if test in own.get("quarter", ()):
                less = mean(own["quarter"][test])
                rows.append([file, f"{test}, a quarter", *rates[:-1], f"{less:,.1f}", f"{less / max(others):.2f}x", ""])
    heads = ["file", "test", *(f"{names[peer]}, tokens/s" for peer in peers), "snapstream, tokens/s"]
    heads += ["ratio" if len(peers) == 1 else "to the best", "of the read rate"]
    engines = ", ".join(dict.fromkeys(model[peer]["engine"] for model in figures["models"] for peer in peers))
    return table(heads, rows) + f"\n\n{engines}, {figures['threads']} threads."


def experts(figures: dict[str, Any]) -> str:
    """A mixture in several engines: decode alone, and how near a step comes to reading what its rows chose."""
    batches = sorted({line["batch"] for line in figures["arms"]})
    engines = dict.fromkeys(line["engine"] for line in figures["arms"])
    found = {(line["engine"], line["batch"]): line for line in figures["arms"]}
    chosen = {line["batch"]: line["experts_chosen"] for line in figures["arms"]}
    rows = []
    for engine in engines:
        own = [found.get((engine, batch), {}) for batch in batches]
        shares = ["" if line.get("share_of_read_rate") is None else f"{line['share_of_read_rate']:.0%}" for line in own]
        same = [f"{line['same_tokens']:.0%}" if "same_tokens" in line else "" for line in own]
        rows.append([engine, *(_rate(line.get("decode_tokens_per_s")) for line in own), *shares, *same])
    heads = [f"{kind}, batch {batch}" for kind in ("tokens/s", "of the read rate", "same tokens") for batch in batches]
    parts = [
        f"{figures['prompt_len']} tokens of prompt, {figures['new_tokens']} new tokens, full cache, "
        f"{figures['threads']} threads; decode alone. A step reads "
        + ", ".join(f"{count:.1f} experts of each layer at batch {batch}" for batch, count in sorted(chosen.items()))
        + ":",
        table(["engine", *heads], rows),
    ]
    parts += [f"Left out: {name} ({reason})." for name, reason in figures["left_out"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    return "\n\n".join([*parts, f"Versions: {versions}."])


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def serving(figures: dict[str, Any]) -> str:
    rows = [
        ["output tokens/s", f"{figures['engine_tokens_per_s']:,.0f}", f"{figures['server_tokens_per_s']:,.0f}",
         f"{figures['throughput_ratio']:.1%}"],
        ["ms to the first token when idle", f"{figures['engine_first_token_ms']:.1f}",
         f"{figures['server_first_token_ms']:.1f}", f"+{figures['first_token_cost_ms']:.1f} ms"],
    ]  # fmt: skip
    if "kept_alive_ms" in figures:  # results before it was measured
        rows.append(["ms of a request on a kept-alive connection", f"{figures['engine_request_ms']:.1f}",
                     f"{figures['kept_alive_ms']:.1f}", f"+{figures['kept_alive_cost_ms']:.1f} ms"])  # fmt: skip
    size = f"{figures['rows']} streams of {figures['max_tokens']} tokens after {figures['prompt_len']}-token prompts"
    return f"What HTTP costs, {size}:\n\n" + table(["", "engine in-process", "over HTTP", "against it"], rows)


def soak(figures: dict[str, Any]) -> str:
    outcomes = figures["outcomes"]
    rows = [
        ["right, compared with the engine alone", f"{outcomes['right']:,}"],
        ["cancelled by the client", f"{outcomes['cancelled']:,}"],
        ["malformed and refused", f"{outcomes['refused']:,}"],
        ["wrong, lost or 5xx", f"{len(figures['failures']):,}"],
        ["429, tried again", f"{outcomes.get('tried again', 0):,}"],
        *([f"growth of the {name}'s memory, second half", f"{growth:+.1%}"]
          for name, growth in figures["memory_growth"].items()),
    ]  # fmt: skip
    size = f"{figures['requests']:,} requests from {figures['clients']} clients on {figures['max_rows']} rows"
    return f"Soak, {size}:\n\n" + table(["", ""], rows)


def spec_prefill(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['prompt_len']:,}", f"{arm['keep']:.0%}", str(arm["look_ahead"]), f"{arm['full_s']:.2f} s",
         f"{arm['first_token_s']:.2f} s", f"{arm['draft_s']:.2f} s", f"{arm['speedup']:.1f}x",
         f"{arm['predicted']:.1f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["prompt", "kept", "look-ahead", "first token, whole prompt", "first token, draft included", "of it draft",
             "sooner", "as the operations predict"]  # fmt: skip
    return "Time to the first token with a draft in front:\n\n" + table(heads, rows)


def executors(figures: dict[str, Any]) -> str:
    rows = [
        [str(arm.get("rows", figures.get("rows"))), f"{arm['context']:,}", arm["sampling"], f"{arm['eager_ms']:.2f} ms",
         f"{arm['looped_ms']:.3f} ms", f"{arm['looped_speedup']:.2f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["rows", "tokens in the rows", "sampling", "eager", "looped", "faster"]
    return f"An engine's decode step, eager against looped (medians):\n\n{table(heads, rows)}"


def grammar(figures: dict[str, Any]) -> str:
    rows = []
    for run in figures["runs"]:
        sampled = {entry["rows"]: entry for entry in run["sampling"]}[8]
        rows += [
            [f"{run['size']:,}", name, f"{mask['compile_ms']:.1f} ms", f"{mask['mask_us_median']:.0f} µs",
             f"{mask['mask_us_p99']:.0f} µs", f"{sampled['extra_us_per_row']:.0f} µs"]
            for name, mask in run["masks"].items()
        ]  # fmt: skip
    heads = ["vocabulary", "grammar", "compiled once in", "a mask, median", "p99", "sampling, more per row (8 rows)"]
    return "What a grammar costs on the host:\n\n" + table(heads, rows)


def turns(figures: dict[str, Any]) -> str:
    rows = [
        ["without a store", f"{figures['cold_s']:.2f} s", "1", ""],
        ["first turn, which fills the store", f"{figures['cold_store_on_s']:.2f} s",
         f"{1 / figures['cold_slowdown']:.2f}x", f"{figures['copied_out_share']:.2%}"],
        ["later turn, out of the store", f"{figures['hit_s']:.2f} s", f"{figures['speedup']:.1f}x",
         f"{figures['hit_copies_share']:.2%}"],
    ]  # fmt: skip
    size = (
        f"{figures['context']:,} tokens in common and {figures['new']} new ones, {figures['cached_tokens']:,} restored"
    )
    heads = ["turn", "first token", "sooner", "copies, of the rest"]
    return f"Time to the first token, {figures['model']}, {size}:\n\n" + table(heads, rows)


def agent_turns(figures: dict[str, Any]) -> str:
    names = {"store": "snapstream", "no_store": "snapstream without a prefix store"}
    rows = []
    for side, runs in figures["sides"].items():

        def mean(name: str, runs: list[dict[str, Any]] = runs) -> float:
            return float(sum(run[name] for run in runs) / len(runs))

        share = figures["against"].get(side)
        rows.append([names.get(side, side), f"{mean('total_s'):.1f} s", f"{mean('first_turn_s'):.1f} s",
                     f"{mean('later_first_token_s'):.2f} s", "" if share is None else f"{share:.2f}"])  # fmt: skip
    first, last = figures["prompt_tokens"][0], figures["prompt_tokens"][-1]
    size = f"{figures['turns']} turns, prompts of {first:,} to {last:,} tokens, answers of {figures['answer']}"
    heads = ["server", "all turns", "first turn", "first token of a later turn", "our time over this one's"]
    return f"A coding agent's transcript through servers, {size}:\n\n" + table(heads, rows)


def drop_in(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['prompt_len']:,}", arm["cache"], f"{arm['cache_mib']:.1f} MiB", f"{arm['peak_mib']:.0f} MiB",
         f"{arm['prompt_s']:.2f} s", f"{arm['token_ms']:.1f} ms"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["prompt", "cache", "bytes", "peak beside the model", "prompt read in", "a token"]
    return "`model.generate` of transformers with its own caches and with rows, batch 1:\n\n" + table(heads, rows)


def bad_sockets(figures: dict[str, Any]) -> str:
    alone, beside = figures["gap_ms_alone"], figures["gap_ms_beside"]
    rows = [
        ["alone", f"{alone['p50']:.2f} ms", f"{alone['p99']:.1f} ms"],
        ["beside them", f"{beside['p50']:.2f} ms", f"{beside['p99']:.1f} ms"],
    ]
    return (
        f"Between two pieces of {figures['num_good']} streams, beside {figures['num_silent']} connections that say "
        f"nothing and {figures['num_deaf']} that ask and never read:\n\n" + table(["streams", "median", "p99"], rows)
    )


def transfer(figures: dict[str, Any]) -> str:
    rows = [
        [f"{link['gbit']:g} Gbit/s" if link["gbit"] else "loopback", f"{link['here_s']:.2f} s",
         f"{link['while_reading_s']:.2f} s", f"{link['at_end_s']:.2f} s", f"{link['saved_s']:.2f} s",
         f"{link['row_s_on_link']:.2f} s" if link["gbit"] else ""]
        for link in figures["links"]
    ]  # fmt: skip
    size = (
        f"{figures['context']:,} tokens into {figures['slots']:,} slots, a row of {figures['row_bytes'] / 2**20:,.1f} "
        f"MiB in {figures['layers']} parts"
    )
    heads = ["link", "read here", "sent while it is read", "sent at the end", "saved", "the row alone on the link"]
    return f"Time to the first token, {size}:\n\n" + table(heads, rows)


def ranks(figures: dict[str, Any]) -> str:
    rows = [
        [str(arm["ranks"]), arm["executor"], arm["sampling"], f"{arm['ms']:.2f} ms", f"{arm['least_ms']:.2f} ms"]
        for arm in figures["arms"]
    ]
    heads = ["ranks", "executor", "sampling", "median", "least"]
    return f"A step of {figures['rows']} rows of {figures['context']:,} tokens:\n\n" + table(heads, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "looping": looping, "looping_rows": looping_rows, "equal_memory": equal_memory,
    "decode": decode,
    "speculation": speculation, "prefill": prefill, "prefill_latents": prefill, "memory": memory, "peers_100m": peers,
    "prefill_intel": prefill,
    "peers_tiny": peers, "peers_batches_100m": peers_batches, **dict.fromkeys(FILES, llama_bench),
    **dict.fromkeys(ENGINES, peers_all), **dict.fromkeys(LADDERS, looping),
    "spec_prefill": spec_prefill, "serving": serving,
    "draft_model": draft_model, "prediction": prediction, "schema_drafts_avx2": schema_drafts, "soak": soak,
    "executors": executors,
    "grammar": grammar, "turns": turns, "turns_qwen3.5-100m_avx2": turns, "agent_turns": agent_turns,
    "drop_in": drop_in, "experts": experts, "bad_sockets": bad_sockets, "transfer": transfer,
    "ranks": ranks, "sampling": sampling, "ray_scale": ray_scale, "ray_soak": ray_soak,
}  # fmt: skip

TINY = "the tiny model that ships"
MODELS = {
    "peers_tiny": TINY, "soak": TINY, "serving": TINY, "executors": TINY, "grammar": "masks and sampling alone",
    "bad_sockets": TINY, "ray_soak": TINY, **dict.fromkeys(FILES, "random weights of published shapes"),
}  # fmt: skip  # elsewhere the result names its model


def section(name: str, document: Path) -> str:
    """Markdown of the newest result of that name, with its source underneath, for ``document``.

    ValueError if nothing was measured.
    """
    path, result = newest(name)
    figures = result["figures"]
    model = figures.get("model", MODELS.get(name, "random Llama 100M fp32"))
    where = f"[{path.relative_to(RESULTS.parents[1]).as_posix()}]({link(path, document)})"
    return f"{TABLES[name](figures)}\n\n<sub>{model}; {result['device']}; `{result['command']}`; {where}</sub>\n"
