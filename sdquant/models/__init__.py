"""Model facts taken from diffusers and transformers themselves: names, sizes, kinds of layers."""
