"""How GGUF stores numbers: plainly, or in blocks of codes that share a scale.

The numbers are those of ``enum ggml_type`` in ggml.h; sizes as in the ``gguf`` package's ``GGML_QUANT_SIZES``. They are
written out because a header is understood in milliseconds, and importing that package takes longer.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """One way to store numbers.

    Attributes:
        name: As llama.cpp calls it.
        elements: Numbers in a block.
        nbytes: Bytes of a block.
        torch_name: The dtype of numbers that are stored plainly; empty where they are coded.
    """

    name: str
    elements: int
    nbytes: int
    torch_name: str = ""


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, "float32"),
    1: GgmlType("F16", 1, 2, "float16"),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1, "int8"),
    25: GgmlType("I16", 1, 2, "int16"),
    26: GgmlType("I32", 1, 4, "int32"),
    27: GgmlType("I64", 1, 8, "int64"),
    28: GgmlType("F64", 1, 8, "float64"),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, "bfloat16"),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

# ggml makes these on the way; or no library turns their codes into numbers yet.
WITHOUT_DECODER = frozenset({"Q8_1", "Q8_K", "Q1_0"})

# Where in a block numbers of two bytes lie, which a big-endian file has the other way round. Types that aren't listed
# hold larger numbers, or numbers across bytes, of which nobody has said how a big-endian file has them.
HALVES_IN_BLOCK: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
}
