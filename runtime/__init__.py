"""Runs a bundle: numpy, onnxruntime and tokenizers, nothing else. Start at `infer.runtime.model.LanguageModel`."""
