"""A stand-in of PaddlePaddle: only the functions of its memory, by their documented names."""
