"""How ggml is compiled for a processor: a CMake flag for each group of instructions.

Left to itself it is compiled for all that the processor of that moment announces: then it ends on an
older one with an illegal instruction, and in virtual machines that announce AMX and do not grant it.
"""

from __future__ import annotations

import platform

from stem_edge.user_folder import cpu_announces

# Flag -> what Linux calls it. ggml's kernels for AMX are left out: they save nothing here.
X86 = {
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
    "GGML_AVX_VNNI": "avx_vnni",
    "GGML_AVX512": "avx512vl",
    "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}
# All that x86-64 of the last ten years has; where the system does not tell, it is assumed.
USUAL = ("avx", "avx2", "fma", "f16c", "bmi2")
ARM = "GGML_CPU_ARM_ARCH"


def cmake_flags() -> str:
    """Flags for this processor, for CMAKE_ARGS."""
    flags = ["-DGGML_NATIVE=OFF"]
    if platform.machine().lower() in ("aarch64", "arm64"):
        dots = "+dotprod" * cpu_announces("asimddp") + "+i8mm" * cpu_announces("i8mm")
        return " ".join([*flags, f"-D{ARM}=armv8.2-a{dots}"] if dots else flags)
    told = cpu_announces("sse2")  # as every x86-64 does
    for flag, word in X86.items():
        there = cpu_announces(word) if told else word in USUAL
        flags.append(f"-D{flag}={'ON' if there else 'OFF'}")
    return " ".join(flags)
