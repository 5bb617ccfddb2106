"""Kernels become machine code for a GPU on a machine without one.

Triton's interpreter, in which the other tests run here, takes what its compiler does not.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ready_process import ReadyProcess

TABLES = {
    "host_ptr": "*i64", "pool_ptr": "*i64", "mask_ptr": "*bf16", "start_ptr": "*i32",
    "units_ptr": "*i32", "slots_ptr": "*i32", "counts_ptr": "*i32", "width": "i32",
    "host_row_words": "i32", "pool_row_words": "i32", "mask_row": "i32",
}  # fmt: skip
STRIDES = (
    "heads", "key_heads", "query_row", "query_head", "key_row", "key_head", "position_row",
)  # fmt: skip
ENDS = ("query_ptr", "key_ptr", "cos_ptr", "sin_ptr", "query_out_ptr", "key_out_ptr")
TURNED = {"DIM": 128, "PAIRS": 64, "LEFT": 0, "PAIRS_WIDE": 64, "INTERLEAVED": False}
UNIT_SIZES = {"WORDS": 64, "CHUNK": 64, "UNIT": 1, "UNIT_WIDE": 1}


def parts(kind: str) -> list[tuple[Any, ...]]:
    """Norms, rotations and gates of one dtype."""
    return [
        (
            "elementwise_triton", "_rms_norm",
            {"hidden_ptr": f"*{kind}", "weight_ptr": f"*{kind}", "out_ptr": f"*{kind}",
             "dim": "i32", "eps": "fp32"}, {"WIDE": 4096}, 8,
        ),
        (
            "elementwise_triton", "_gated",
            {"gate_ptr": f"*{kind}", "up_ptr": f"*{kind}", "out_ptr": f"*{kind}", "count": "i32"},
            {"AT_ONCE": 1024}, 4,
        ),
        (
            "elementwise_triton", "_rotate",
            {**dict.fromkeys(ENDS, f"*{kind}"), **dict.fromkeys(STRIDES, "i32")},
            {"HALF": 64, "WIDE": 64}, 1,
        ),
    ]  # fmt: skip


SELECT = {
    **dict.fromkeys(("first", "sizes", "count", "members", "ids", "ends", "current"), "*i32"),
    **dict.fromkeys(("scores", "lost_mass", "keep"), "fp32"), "scores": "*fp32", "due": "*i1",
    "valid": "*i1", "renewed": "*i64", **dict.fromkeys(("lost", "before", "now"), "*fp32"),
    **dict.fromkeys(("capacity", "tokens", "budget"), "i32"),
}  # fmt: skip
KERNELS = [
    (
        "units_triton", "_select", SELECT,
        {"PADDED": 4096, "PADDED_BUDGET": 512, "STEPS": 12, "UPKEEP": True,
         "HEADS": 7, "PADDED_HEADS": 8}, 16,
    ),
    (
        "rank_units_triton", "_rank",
        {"scores": "*fp32", "first": "*i32", "end": "*i64", "slot_of": "*i32", "out": "*fp32",
         "units": "i32", "resident_factor": "fp32"}, {"BLOCK": 1024, "RESIDENT": True}, 4,
    ),
    ("slots_triton", "_gather", TABLES, {**UNIT_SIZES, "ENTRIES": 8, "TILES": 16}, 4),
    (
        "slots_triton", "_gather_staying", {**TABLES, "rows": "i32"},
        {**UNIT_SIZES, "ENTRIES": 64, "CHUNKS": 1, "ROWS": 256}, 8,
    ),
    *(
        (
            "slots_triton", "_gather_coded",
            {"host_ptr": f"*{kind}", "codes_ptr": "*i8", "scales_ptr": "*i16",
             "mask_ptr": f"*{kind}",
             **dict.fromkeys(("start_ptr", "units_ptr", "slots_ptr", "counts_ptr"), "*i32"),
             **dict.fromkeys(("rows", "width", "host_row", "codes_row", "mask_row"), "i32")},
            {"ROWS": 8, "PARTS": 16, "DIM": dim, "DIM_WIDE": 128, "LINES": lines, "CHUNKS": 1,
             "ENTRIES": entries, "UNIT": 4, "UNIT_WIDE": 4}, warps,
        )
        for kind, dim, lines, entries, warps in (("bf16", 128, 64, 2, 32), ("fp32", 96, 16, 1, 4))
    ),
    *(
        (
            "attention_triton", "_attend",
            {"query_ptr": f"*{kind}", "codes_ptr": "*i8", "scales_ptr": "*i16",
             "tokens_ptr": f"*{kind}", "mask_ptr": f"*{kind}",
             **dict.fromkeys(("parts_ptr", "maxima_ptr", "sums_ptr"), "*fp32"),
             **dict.fromkeys(("query_row", "query_head", "codes_row", "tokens_row", "mask_row",
                              "coded_places", "places", "coded_splits", "splits"), "i32"),
             "scale": "fp32"},
            {"HEADS": 4, "KV_HEADS": 8, "HEADS_WIDE": 16, "DIM": dim, "DIM_WIDE": dim,
             "CODED_BLOCKS": coded, "SPLIT_BLOCKS": 2,
             "BLOCK": 32, "PRECISION": precision, "WIDEN": False}, 4,
        )
        # Products of float32 are unrolled: wide ones take the compiler seconds.
        for kind, precision, dim, coded in (
            ("bf16", "tf32", 128, 0), ("bf16", "tf32", 128, 2), ("fp32", "ieee", 32, 2),
        )
    ),
    (
        "block_queries_triton", "_turned_and_projected",
        {"query": "*bf16", "basis": "*bf16", "factor": "*fp32", "table": "*fp32",
         "row_turn": "*fp32", "out": "*bf16", "blocks": "i32", "rank": "i32"},
        {**TURNED, "DIM": 64, "PAIRS": 32, "PAIRS_WIDE": 32, "SHARE": 4, "SHARE_WIDE": 4,
         "ROWS": 64, "RANK_WIDE": 32, "LEFT_WIDE": 16, "WHOLE": False}, 4,
    ),
    (
        "put_codes_triton", "_put",
        {"keys": "*bf16", "unit_at": "*i64", "codes": "*u8", "encoder": "*bf16",
         "per_step": "*fp32", "table": "*fp32", "row_turn": "*fp32", "codes_row": "i32",
         "codes_block": "i32", "units": "i32", "rank": "i32"},
        {**TURNED, "KV_HEADS": 2, "TOKENS": 4, "TOKENS_WIDE": 4, "LEFT_WIDE": 1, "WIDTH": 32,
         "BITS": 4, "FINE": 4, "PER_TURN": 16, "COLUMNS": 2}, 4,
    ),
    (
        "merge_triton", "_merge",
        {**dict.fromkeys(("out_ptr", "lse_ptr", "other_lse_ptr"), "*fp32"), "other_ptr": "*bf16",
         **dict.fromkeys(("count", "heads", "queries", "dim"), "i32"),
         **dict.fromkeys(("other_row", "other_head", "other_query"), "i32")},
        {"ROWS": 16, "WIDE": 64}, 4,
    ),
    *parts("bf16"), *parts("fp32"),
]  # fmt: skip
PROGRAM = """
import gc, importlib, json, sys
gc.freeze()  # what the compiler collects is its own
# What forks this process may hold the interpreter's Triton, and kernels made for that.
for name in [*sys.modules]:
    if name.startswith(("triton.", "penstock.kernels.device.")) and "._C" not in name:
        del sys.modules[name]
sys.modules.pop("triton", None)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
for module, name, signature, constants, warps in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module("penstock.kernels.device." + module), name)
    source = ASTSource(
        fn=kernel, signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(name, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_a_gpu(triton: None, tmp_path: Path) -> None:
    """In a process of its own: here the kernels are the interpreter's."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    with ReadyProcess(PROGRAM, json.dumps(KERNELS), environment=environment) as run:
        said = run.stdout.read()
        status, errors = run.wait(), run.errors()
    if "Cannot find ptxas" in errors:
        pytest.skip("this build of Triton has no assembler")
    assert status == 0, errors
    told = [line.split() for line in said.splitlines()]
    assert [name for name, _ in told] == [kernel[1] for kernel in KERNELS]
    assert all(int(size) > 1000 for _, size in told)
