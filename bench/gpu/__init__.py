"""The phases of `bench.gpu_all`, each a module with `measure(device, small)`, which yields rows one by one."""
