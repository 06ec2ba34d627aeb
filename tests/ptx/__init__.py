"""Compiled code of an NVIDIA card, run without one: PTX on numpy arrays, all threads of a launch at once.

Triton's interpreter runs what is written; this runs what its compiler made of it for sm_80: layouts and masks, fused
and contracted operations, undefined values that LLVM has settled, conversions, what each thread holds of a tensor
core's operands. It knows nothing of the project and needs no more than numpy; `driver` alone imports triton and torch.

    with driver.use():                      # Triton launches here from now on, on tensors of the CPU
        kernel[grid](x, out, ...)

* `program`: the text of PTX to instructions and operands.   * `kinds`: its types, and rounding as it is on a card.
* `memory`: the tensors of a launch, shared memory.          * `machine`: registers, branches, barriers.
* `arithmetic`, `movement`, `tensor_cores`: the instructions, a function or a row for each.
* `driver`: what Triton takes for a card's driver.

A `Fault` is raised for what a card may do anything for: an access outside of the tensors and of shared memory, or one
that is not aligned; a register that was never written; threads that write different numbers to one place; a barrier
that a part of a program reaches. Memory and registers begin with numbers that are no one's; what is copied to shared
memory in the background arrives when it is waited for, and no sooner. `Unsupported` are instructions without a row.

What it cannot see: time; races between barriers, as threads go in step; the last bits of sums in tensor cores, which
are exact here. Warp-group instructions of sm_90 and sm_100 (wgmma, tcgen05, TMA) have no rows: compile for sm_80.
"""
