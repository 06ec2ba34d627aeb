"""Kernels for GPUs, written in Triton. Importing this package imports neither triton nor torch.

* `blocks`: the chunks of each packing, as rows of a table. No triton.
* `loads`, `decoding`, `grids`: device functions from packed codes to numbers. `weights`: kernels on them: decode, and
  two products.
* `activations`, `products`: device code for `int8_gemm`, products of 8-bit codes. `tiles`: their sizes. No triton.
* `rotation`: rotations of activations, alone or while rows are quantized. `gathering`: columns in another order.
* `launch_config`: a launch, and its arguments for a form. `launch`: launches over weights.
* `bound_linear`, `bound_eight`: the same launches bound to a layer's weight, so that a call replaces addresses alone.
* `triton_kernels`: the reader for `dispatch`.
* `imports`: the one place that imports the files that import triton.

Only features of Triton that releases 3.2 (torch 2.6) to 3.9 have are used: `tl.load`, `tl.store`, `tl.where`,
`tl.reshape`, `tl.full`, `tl.dot`, `tl.sum`, `tl.max`, `tl.reduce`, `tl.fma`, `tl.div_rn`, `tl.static_range`, bitcasts
and casts of pointers, and the launch option `enable_fp_fusion`; `tl.gather` where there is one. No autotuning (it would
cost seconds at the first call), no tensor descriptors, no inline assembly (the interpreter has none).
"""
