"""What fits: how many tokens and requests a model's KV cache lets be under way, on the devices and in a store.

MODEL is a checkpoint, or a directory with nothing but its config.json. Sizes of memory are those of one rank. Without
--weights the checkpoint's own files are taken, shared out over the tensor parallel ranks.

example:
  forebay plan ./DeepSeek-V3 --gpu-memory 141GiB --tp 8 --dcp 8 --weights 680GiB --host-memory 1TiB
  forebay plan ./Llama-3-8B --gpu-memory 80GiB --context 131072 --plot capacity.png
  forebay plan ./GLM-5 --gpu-memory 141GiB --tp 8 --weights 704GiB --host-memory 1TiB --hot-buffer-rows 4096
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.tables import bytes_text, table
from forebay.config import Setting, add_settings, at_least, boolean, one_of, path, resolve, share, size
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.models.base import ModelInfo
    from forebay.models.capacity import Budget, Fit, Ranks
    from forebay.models.sparse_capacity import HotFit

ITEM_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0}

SETTINGS = (
    Setting("model", path, None, "checkpoint, or a directory with its config.json", positional=True),
    Setting("gpu_memory", size, None, "memory of one rank"),
    Setting("tp", at_least(1), 1, "tensor parallel ranks"),
    Setting("dcp", at_least(1), 1, "decode context parallel ranks among them"),
    Setting("context", at_least(1), None, "longest context to show", shown="the model's"),
    Setting("kv_dtype", one_of(*ITEM_BYTES), "bfloat16", "of the KV cache; fp8 with one scale a tensor"),
    Setting("index_cache_dtype", one_of("model", "fp8"), "model", "of sparse layers' index keys; fp8 has a scale each"),
    Setting("weights", size, None, "of all ranks together", shown="the checkpoint's files"),
    Setting("reserve", size, 4 << 30, "of a rank, for activations and the runtime", shown="4GiB"),
    Setting("utilisation", share, 0.92, "share of a rank's memory that may be used", shown="92%"),
    Setting("host_memory", size, None, "of the store, to say how many requests it holds"),
    Setting("files", size, None, "of its file tier"),
    Setting(
        "hot_buffer_rows", at_least(0), None, "of sparse layers: say what hot buffers of so many rows let be under way",
        shown="nothing said; 0: twice what a step reads",
    ),
    Setting("plot", path, None, "draw requests over context lengths into this PNG (needs matplotlib)"),
    Setting("json", boolean, False, "one object a line instead of a table", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Print what fits."""
    values = resolve("plan", SETTINGS, flags)
    if values["model"] is None or values["gpu_memory"] is None:
        raise ConfigError("a plan needs MODEL and --gpu-memory, such as --gpu-memory 80GiB")
    from forebay.models.capacity import Budget, Ranks, contexts, fit
    from forebay.models.loading import read_info

    info = read_info(values["model"], values["index_cache_dtype"])
    ranks, item = Ranks(values["tp"], values["dcp"]), ITEM_BYTES[values["kv_dtype"]]
    ranks.check(info)
    weights = _weights(values["model"]) if values["weights"] is None else values["weights"]
    budget = Budget(values["gpu_memory"], -(-weights // ranks.tp), values["reserve"], values["utilisation"])
    longest = values["context"] or info.max_context
    if longest > info.max_context:
        print(f"forebay: the model's own context ends at {info.max_context} tokens", file=sys.stderr)
    fits = [fit(info, ranks, item, budget, n, values["host_memory"], values["files"]) for n in contexts(longest)]
    if values["hot_buffer_rows"] is not None:
        return _show_hot(values, _hot_fits(values, info, item, budget, [one.context for one in fits]))
    if values["json"]:
        print("\n".join(json.dumps(_object(one)) for one in fits))
    else:
        print(_summary(info, ranks, item, budget, weights))
        print(_table(fits))
    if values["plot"] is not None:
        _plot(values["plot"], info, fits)
    return 0


def _hot_fits(
    values: dict[str, Any], info: ModelInfo, item: float, budget: Budget, lengths: Sequence[int]
) -> list[HotFit]:
    from forebay.models.sparse_capacity import hot_fit, our_blocks

    if values["host_memory"] is None:
        raise ConfigError("with --hot-buffer-rows say --host-memory: rows that aren't on the device are there")
    rows = values["hot_buffer_rows"] or 2 * (info.sparse.top_k if info.sparse is not None else 0)
    blocks = our_blocks(info, item, rows)
    return [hot_fit(blocks, length, budget.kv, values["host_memory"]) for length in lengths]


def _show_hot(values: dict[str, Any], fits: Sequence[HotFit]) -> int:
    if values["json"]:
        print("\n".join(json.dumps(asdict(one)) for one in fits))
        return 0
    head = ["context", "all on the device", "hot: device limit", "hot: host limit", "requests"]
    rows = [[f"{one.context:,}", *map(str, (one.full, one.device, one.host, one.requests))] for one in fits]
    print(table(head, rows, right=range(len(head))))
    return 0


def _weights(model: Path) -> int:
    """Bytes of the checkpoint's tensors, 0 where there are none."""
    if model.is_file():
        return model.stat().st_size
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _summary(info: ModelInfo, ranks: Ranks, item: float, budget: Budget, weights: int) -> str:
    from forebay.models.capacity import fixed_whole, per_token, per_token_whole

    groups = ", ".join(
        f"{len(group.layers)} layers of {group.name} ({group.kv_heads} x {group.head_dim}"
        f"{'' if group.window is None else f', window {group.window}'})"
        for group in info.kv_groups
    )
    lines = [
        f"{info.family}: {groups}",
        f"a token takes {per_token_whole(info, item):,.0f} bytes in the store, {per_token(info, ranks, item):,.0f} on "
        f"each of {ranks.tp} ranks",
    ]
    if fixed := fixed_whole(info, item):
        lines.append(f"a request's windows take {bytes_text(fixed)} in the store, however long it is")
    told = f"{bytes_text(weights)} of weights in all" if weights else "no weights counted: give --weights"
    lines.append(f"a rank has {bytes_text(budget.kv)} for KV ({told})")
    return "\n".join(lines) + "\n"


def _table(fits: Sequence[Fit]) -> str:
    head = ["context", "a request, rank", "a request, store", "requests", "tokens"]
    head += [name for name, there in (("in memory", fits[0].host), ("in files", fits[0].files)) if there is not None]
    rows = [
        [
            f"{one.context:,}", bytes_text(one.footprint.rank), bytes_text(one.footprint.whole), f"{one.requests:,}",
            f"{one.tokens:,}", *(f"{there:,}" for there in (one.host, one.files) if there is not None),
        ]
        for one in fits
    ]  # fmt: skip
    return table(head, rows, right=range(len(head)))


def _object(one: Fit) -> dict[str, int | None]:
    return {
        "context": one.context, "rank_bytes": one.footprint.rank, "store_bytes": one.footprint.whole,
        "requests": one.requests, "tokens": one.tokens, "host_requests": one.host, "file_requests": one.files,
    }  # fmt: skip


def _plot(target: Path, info: ModelInfo, fits: Sequence[Fit]) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("to draw, install the package matplotlib (pip install 'forebay[plot]')") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    places = [one.context for one in fits]
    lines = {"device": [one.requests for one in fits]}
    lines |= {name: [getattr(one, field) for one in fits] for name, field in (("store's memory", "host"),
              ("store's files", "files")) if getattr(fits[0], field) is not None}  # fmt: skip
    for name, counts in lines.items():
        axes.plot(places, counts, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of a request", ylabel="requests at a time", title=info.family)
    axes.set_xticks(places, [f"{place:,}" for place in places], rotation=30)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {target}: {error.strerror}") from error
    finally:
        plt.close(figure)
