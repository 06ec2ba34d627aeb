"""Small programs, and what is wrong with some of them."""

from __future__ import annotations

import numpy as np
import pytest

from .kinds import fused, to_bfloat16
from .machine import Machine, run
from .memory import Fault, Span
from .program import Instruction, Unsupported, parse

HEAD = """
.version 8.8
.target sm_80
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0, .param .u32 k_param_1)
.reqntid 64
{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b32 %r1, [k_param_1];
    mov.u32 %r2, %tid.x;
    mad.wide.u32 %rd2, %r2, 4, %rd1;
"""


def after(body: str, numbers: np.ndarray | None = None, number: int = 0, shared: int = 256) -> np.ndarray:
    """What a program of 64 threads leaves of its tensor; %rd2 is the address of a thread's number of 32 bits."""
    held = np.arange(64, dtype=np.uint32) if numbers is None else numbers
    address = int(held.ctypes.data)
    run(HEAD + body + "\nret;\n}", [address, number], [Span(address, held.nbytes, "x")], (1,), shared)
    return held


def test_a_branch_parts_threads_and_they_meet_again() -> None:
    body = """
        setp.lt.u32 %p1, %r2, 10;
        mov.b32 %r3, 5;
        @%p1 bra $SMALL;
        add.s32 %r3, %r3, 100;
        bra.uni $BOTH;
    $SMALL:
        add.s32 %r3, %r3, %r2;
    $BOTH:
        bar.sync 0;
        st.global.b32 [%rd2], %r3;"""
    assert after(body).tolist() == [*range(5, 15), *[105] * 54]


def test_a_loop_whose_turns_differ() -> None:
    body = """
        mov.b32 %r3, 0;
    $AGAIN:
        add.s32 %r3, %r3, 3;
        setp.lt.u32 %p1, %r3, %r2;
        @%p1 bra $AGAIN;
        st.global.b32 [%rd2], %r3;"""
    assert after(body).tolist() == [max(3, -(-i // 3) * 3) for i in range(64)]


def test_a_copy_in_the_background_is_there_when_it_is_waited_for() -> None:
    body = """
        shl.b32 %r3, %r2, 2;
        mov.b32 %r4, global_smem;
        add.s32 %r5, %r4, %r3;
        cp.async.ca.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x4;
        cp.async.commit_group;
        WAIT
        bar.sync 0;
        xor.b32 %r6, %r3, 4;
        ld.shared.b32 %r7, [%r6];
        st.global.b32 [%rd2], %r7;"""
    assert after(body.replace("WAIT", "cp.async.wait_group 0;")).tolist() == [i ^ 1 for i in range(64)]
    assert set(after(body.replace("WAIT", "cp.async.wait_group 1;")).tolist()) == {0xA5A5A5A5}


def test_threads_of_a_warp_read_each_others_registers() -> None:
    body = "shfl.sync.bfly.b32 %r3, %r2, 8, 31, -1;\nst.global.b32 [%rd2], %r3;"
    assert after(body).tolist() == [i ^ 8 for i in range(64)]
    body = "shfl.sync.up.b32 %r3|%p1, %r2, 1, 0, -1;\nst.global.b32 [%rd2], %r3;"
    assert after(body).tolist() == [i - 1 if i % 32 else i for i in range(64)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("st.global.b32 [%rd2+4], %r2;", "4 bytes beyond the 256 bytes of x"),
        ("ld.global.b32 %r3, [%rd2+-4];", "in front of all tensors"),
        ("ld.global.v2.b32 {%r3, %r4}, [%rd2];", "8 bytes is not aligned"),
        ("ld.global.b32 %r3, [%rd2+2];", "4 bytes is not aligned"),
        ("st.global.b32 [%rd1], %r2;", "different numbers to one place"),
        ("st.shared.b32 [%r2+256], %r2;", "shared memory"),
        ("add.s32 %r3, %r2, %r9;", "%r9 is read before"),
        ("setp.lt.u32 %p1, %r2, 3;\n@%p1 bra $L;\nbar.sync 0;\n$L: ret;", "only a part of a program reaches"),
        (
            "setp.lt.u32 %p1, %r2, 3;\n@%p1 bra $L;\nshfl.sync.idx.b32 %r3, %r2, 0, 31, -1;\n$L: ret;",
            "a part of a warp",
        ),
    ],
)
def test_a_fault_is_named(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        after(body)


def test_what_there_is_no_row_for_is_named() -> None:
    with pytest.raises(Unsupported, match="wgmma"):
        after("wgmma.fence.sync.aligned;")


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("shl.b32 %r3, %r2, 32;", 0), ("shr.s32 %r3, %r1, 40;", 0xFFFFFFFF), ("shr.u32 %r3, %r1, 28;", 15),
        ("bfe.u32 %r3, %r1, 4, 8;", 0xFF), ("bfe.s32 %r3, %r1, 0, 4;", 0xFFFFFFF8),
        ("prmt.b32 %r3, %r1, 0, 0x4491;", 0x0000FFFF),
        ("lop3.b32 %r3, %r1, 15, 8, 0x96;", 0xFFFFFFFF), ("mul.hi.u32 %r3, %r1, 2;", 1), ("popc.b32 %r3, %r1;", 29),
        ("div.s32 %r3, %r1, 3;", 0xFFFFFFFE), ("rem.s32 %r3, %r1, 3;", 0xFFFFFFFE),
        ("cvt.rzi.s32.f32 %r3, 0fC0600000;", 0xFFFFFFFD), ("cvt.rni.s32.f32 %r3, 0f40200000;", 2),
        ("cvt.rn.f32.s32 %r3, %r1;", 0xC1000000), ("add.rn.f32 %r3, 0f3F800000, 0f33800000;", 0x3F800000),
        ("max.f32 %r3, 0f7FC00000, 0f3F800000;", 0x3F800000), ("shf.r.wrap.b32 %r3, %r1, 1, 31;", 3),
        ("cvt.rn.bf16x2.f32 %r3, 0f3F808000, 0f3F818000;", 0x3F803F82), ("redux.sync.min.s32 %r3, %r2, -1;", None),
        ("fma.rn.bf16x2 %r3, 1065369472, 1065369472, 1065369472;", 0x40004000),
    ],
)  # fmt: skip
def test_arithmetic(instruction: str, wanted: int | None) -> None:
    found = after(f"{instruction}\nst.global.b32 [%rd2], %r3;", number=0xFFFFFFF8)
    assert found.tolist() == ([wanted] * 64 if wanted is not None else [0] * 32 + [32] * 32)


def test_what_is_fused_is_rounded_once() -> None:
    exact = np.random.default_rng(0).normal(size=(3, 4000))
    a, b, c = exact.astype(np.float32)
    c = -(a * b) * np.float32(1 + 2**-20)  # most digits cancel
    wanted = (a.astype(np.longdouble) * b + c).astype(np.float32)
    assert np.array_equal(fused(a, b, c).astype(np.float32), wanted)
    assert not np.array_equal(a * b + c, wanted)
    halfway = np.array([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40])
    assert to_bfloat16(halfway).tolist() == [0x3F80, 0x3F81, 0x3F80]


def test_a_product_of_matrices() -> None:
    """By the table of PTX's documentation: thread 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1."""
    random = np.random.default_rng(0)
    left, right = (random.integers(-4, 4, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    g, t = np.divmod(np.arange(32), 4)

    def pair(matrix: np.ndarray, row: np.ndarray, column: np.ndarray, step: tuple[int, int]) -> np.ndarray:
        two = np.stack([matrix[row, column], matrix[row + step[0], column + step[1]]], -1)
        return np.ascontiguousarray(two).view(np.uint32)[:, 0]

    held = [pair(left, g + 8 * (i % 2), 2 * t + 8 * (i // 2), (0, 1)) for i in range(4)]
    held += [pair(right, 2 * t + 8 * i, g, (1, 0)) for i in range(2)]
    names = "{%r10, %r11, %r12, %r13}", "{%r14, %r15}", "{%r20, %r21, %r22, %r23}"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {names[2]}, {names[0]}, {names[1]}, {names[2]};"
    program = parse(HEAD.replace(".reqntid 64", ".reqntid 32") + text + "\n}")
    machine = Machine(program, [0, 0], [], (1,), 0)
    machine.registers = {f"%r{10 + i}": value for i, value in enumerate(held)}
    machine.registers |= {f"%r{20 + i}": np.zeros(32, np.uint32) for i in range(4)}
    from .tensor_cores import OPERATIONS

    instruction: Instruction = program.code[-1]
    OPERATIONS["mma"](machine, instruction)
    wanted = left.astype(np.float32) @ right.astype(np.float32)
    for i in range(4):
        found = machine.registers[f"%r{20 + i}"].view(np.float32)
        assert np.array_equal(found, wanted[g + 8 * (i // 2), 2 * t + i % 2])
