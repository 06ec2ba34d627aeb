"""Training of a UNet or transformer, quantized or not: `sdquant train CONFIG.yml key=value ...`.

    settings.py      what can be asked for
    data.py          pictures and captions: a folder, or the digits of the shipped models
    families.py      a row for each kind of pipeline: how its prompts are encoded and its network is called
    encoded.py       latents and text states, made once; batches of them
    chance.py        random numbers that depend on where in the training they are drawn, and on nothing else
    objectives.py    what the network is to answer: noise, sample, velocity or flow
    network.py       the network as it is trained: rules, LoRA, and back to a model that can be saved
    checkpoints.py   whole or not there; the last few are kept
    interrupts.py    Ctrl-C ends a training after a step, never within one
    record.py        log.jsonl and the loss curve
    samples.py       a sheet of pictures drawn while training
    loop.py          the steps, on accelerate
    run.py           from settings to a trained model, read top to bottom

A resumed training gives bit for bit what one without a break gives, on the CPU: no random generator's state is carried
from step to step (see chance.py), and all other state is in the checkpoint.
"""
