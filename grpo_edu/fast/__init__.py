"""The same numbers sooner, or in less memory: decoding, packing, chunked logits, micro-batches, optimizers, LoRA."""
