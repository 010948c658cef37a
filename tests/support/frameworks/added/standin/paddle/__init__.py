"""A stand-in of PaddlePaddle: the functions of its memory alone, by their documented names."""
