"""A small module for tests of techniques that wrap any module."""

from torch import nn


class Toy(nn.Module):
    """Names like those of a real model; what forward uses is up to the test."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, use, *args):
        return use(self, *args)
