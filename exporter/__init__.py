"""From a checkpoint to a proven bundle; needs torch and onnx."""
