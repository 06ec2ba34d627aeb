"""What a LoRA does to quantized models inside the web UIs: their own code, pointed at a checkout, on a CPU.

    python -m tools.hosts.sdnext CHECKOUT --python PYTHON_OF_ITS_ENVIRONMENT

Each script makes the files of LoRAs with sdquant's own Python, runs itself in the host's, and prints a table.
"""
