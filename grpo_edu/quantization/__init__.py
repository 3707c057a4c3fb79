"""Quantization: numbers on a grid, quantized layers, quantized models and quantized rollouts."""
