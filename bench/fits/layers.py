"""The parameters of applications as matrices, from their architectures.

Sizes follow from the papers and reference implementations named in each file; nothing is measured. Vectors (biases,
normalisation) are left out: they are hundredths of the whole, and no compressor touches them.
"""

from __future__ import annotations

from collections import Counter

from fits import Made

SUMMARY = "catalog/layers: the matrices of applications, from their architectures"
Shapes = list[tuple[int, int]]


def conv(inputs: int, outputs: int, area: int = 9) -> tuple[int, int]:
    """A convolution: output channels × (input channels · kernel area)."""
    return outputs, inputs * area


def cifar10() -> Shapes:
    """He et al. (arXiv 1512.03385) with two convolutions a block, for images of 32 pixels."""
    shapes, inputs = [conv(3, 64)], 64
    for width in (64, 128, 256, 512):
        shapes += [conv(inputs, width)] + [conv(width, width)] * 3
        if inputs != width:
            shapes.append(conv(inputs, width, 1))
        inputs = width
    return [*shapes, (10, 512)]


def imagenet() -> Shapes:
    """He et al. (arXiv 1512.03385), table 1."""
    shapes, inputs = [conv(3, 64, 49)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [conv(inputs, width, 1), conv(width, width), conv(width, 4 * width, 1)]
            if block == 0:
                shapes.append(conv(inputs, 4 * width, 1))
            inputs = 4 * width
    return [*shapes, (1000, 2048)]


def bert() -> Shapes:
    """Devlin et al. (arXiv 1810.04805), base, with the two outputs of SQuAD."""
    return [(30522, 768), (512, 768)] + ([(768, 768)] * 4 + [(3072, 768), (768, 3072)]) * 12 + [(2, 768)]


def yolov3() -> Shapes:
    """Redmon and Farhadi (arXiv 1804.02767): Darknet-53 and three heads, for the 20 classes of PASCAL VOC."""
    shapes, inputs = [conv(3, 32)], 32
    for width, blocks in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        shapes += [conv(inputs, width)] + [conv(width, width // 2, 1), conv(width // 2, width)] * blocks
        inputs = width
    for width, entered in ((512, 1024), (256, 768), (128, 384)):
        shapes += [conv(entered, width, 1)] + [conv(width, 2 * width), conv(2 * width, width, 1)] * 2
        shapes += [conv(width, 2 * width), conv(2 * width, 75, 1)]
        if width > 128:
            shapes.append(conv(width, width // 2, 1))
    return shapes


def deepspeech2() -> Shapes:
    """Amodei et al. (arXiv 1512.02595): two convolutions, five bidirectional GRUs of 800, 29 characters."""
    shapes = [conv(1, 32, 41 * 11), conv(32, 32, 21 * 11)]
    for entered in (1312, 800, 800, 800, 800):
        shapes += [(2400, entered), (2400, 800)] * 2
    return [*shapes, (29, 800)]


def ncf() -> Shapes:
    """He et al. (arXiv 1708.05031) on MovieLens-1M: factors of 32, and an MLP of three layers above twice 128."""
    tables = [(6040, 32), (3706, 32), (6040, 128), (3706, 128)]
    return [*tables, (128, 256), (64, 128), (32, 64), (1, 64)]


MODELS = (cifar10, imagenet, bert, yolov3, deepspeech2, ncf)
CONVOLUTIONAL = ("cifar10", "imagenet", "yolov3")
"""Whose gradients are taken to be spread as the shipped CNN's; the others' as the shipped GPT's."""


def fit() -> Made:
    files, report = {}, []
    for shapes_of in MODELS:
        name, shapes = shapes_of.__name__, shapes_of()
        rows = ", ".join(f"[{rows}, {columns}, {count}]" for (rows, columns), count in Counter(shapes).items())
        text = "# Written by bench/fits.py layers; do not edit.\n"
        text += f'source: "{shapes_of.__doc__}"\n# rows, columns, how many\nmatrices: [{rows}]\n'
        text += f"convolutional: {str(name in CONVOLUTIONAL).lower()}\n"
        files[f"synergy_core/catalog/layers/{name}.yaml"] = text
        report.append(f"{name}: {sum(a * b for a, b in shapes) / 1e6:.1f} million parameters in {len(shapes)} matrices")
    return Made(files, "\n".join(report))
