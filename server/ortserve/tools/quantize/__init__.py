"""``ortserve quantize``: makes quantized models, and compares them with their source."""
