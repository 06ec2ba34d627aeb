"""Kernels for GPUs, written in Triton. Importing this package imports neither triton nor torch.

* `blocks`: how each packing is taken apart, as rows of a table. No triton.
* `decoding`: device functions, from packed codes to numbers. `weights`: kernels on them: decode, and two products.
* `activations` and `runs`: device code for `eight`, products of 8-bit codes.
* `plans`: what a form needs to be launched. `running`: what a launch is. `launch`: the launches over weights.
* `reader`: what the dispatch sees.
* `library`: the one place that imports the files that import triton.

Used of Triton is only what releases 3.2 (torch 2.6) to 3.9 have: `tl.load`, `tl.store`, `tl.where`, `tl.join`,
`tl.reshape`, `tl.full`, `tl.dot`, `tl.sum`, `tl.max`, `tl.fma`, `tl.div_rn`, `tl.static_range`, bitcasts and casts of
pointers, and the launch option `enable_fp_fusion`. No autotuning (it would cost seconds at the first call), no tensor
descriptors, no inline assembly (the interpreter has none).
"""
