"""What has nothing to do with quantization: atomic writes, strict JSON and YAML, signals, byte sizes, images, processes.

May import `errors` alone.
"""
