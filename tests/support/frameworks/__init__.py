"""The agent inside the real PyTorch, TensorFlow and JAX, in their CPU builds."""
