"""What diffusers and transformers know of their models, asked of them: names, sizes, kinds of layers."""
