"""Every Triton kernel compiles for a GPU, with the arguments of real launches, and fits it."""

import pytest

from tests.triton_interpreter import INTERPRETED

pytest.importorskip("triton")

from tests.kernel_compiler import AWARE, SELECTION, assembler_is_missing, compiling

SHARED_MEMORY = 99 * 1024  # bytes of a block, with compute capability 8.6, 8.9 or 12.0; 8.0 has 163 KiB, and 9.0 has 227
A_FEW_REGISTERS = 96  # bytes of a thread's stack: Triton's versions differ by as much
# These work without shared memory, and with so few registers that twelve warps are at work at a time.
WITHOUT_SHARED_MEMORY = ("box_kernels", "table_kernels.bilinear", "table_kernels.quadratic", "edge_aware_kernels")

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter takes the place of the compiler"),
    pytest.mark.skipif(assembler_is_missing(), reason="this build of Triton has no assembler (ptxas) for NVIDIA's GPUs"),
]


@pytest.mark.parametrize("call", SELECTION, ids=repr)
@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_launches_of_the_library(call, arch):
    with compiling(arch) as found:
        call()
    assert found
    if getattr(call, "graph", None) == AWARE:
        assert "edge_aware_kernels.add_flows" in {kernel.name for kernel in found}, "noise is a loop over relations"
    for kernel in found:
        assert kernel.stack <= A_FEW_REGISTERS, f"registers are spilled: \n{kernel}"
        if kernel.name.startswith(WITHOUT_SHARED_MEMORY):
            assert not kernel.shared, f"threads exchange pixels: \n{kernel}"
            assert kernel.registers <= 168, f"too many registers: \n{kernel}"
        assert kernel.shared <= SHARED_MEMORY, f"too much shared memory for some GPUs: \n{kernel}"
