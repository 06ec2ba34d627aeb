"""Training of a UNet or transformer, quantized or not: `sdquant train CONFIG.yml key=value ...`.

    settings.py        Settings: the values of a training
    data.py            pictures and captions: a folder, or the digits of the shipped models
    pipeline.py        load the pipeline to train
    pipeline_types.py  a row for each pipeline type: encode prompts, call the network
    latent_cache.py    latents and text states, encoded once; batches of them
    rng.py             random numbers that depend only on the seed and the place in the training
    losses.py          the target of the prediction: noise, sample, velocity or flow
    trainable.py       the network to train: rules, LoRA, and back to a model that can be saved
    checkpoints.py     written atomically; the last few are kept
    metrics_log.py     log.jsonl and the loss curve
    samples.py         sheets of images generated during training
    loop.py            the training loop, on accelerate
    run.py             from settings to a trained model, read top to bottom
    calibration.py     find static activation ranges: `sdquant calibrate`
    lora.py            add and save a LoRA
    digits.py          the digits, their prompts and the judge

On the CPU a resumed training is bit-identical to an uninterrupted one: no random generator's state is carried from step
to step (see rng.py), and all other state is in the checkpoint.
"""
