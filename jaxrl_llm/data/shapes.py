"""`task:shapes`: questions about images that are drawn on the spot, for `embedded:shapes`.

An image has one to four shapes of one colour in one quadrant, and a question asks for the colour, their number or the
quadrant: four answers each, all equally likely, so that nothing but the image says more than one in four.
"""

import random

import numpy as np

from jaxrl_llm.data import Row

NAMES = ("shapes", "shapes_blank")
IMAGE_TOKENS = 4  # that a tile is for embedded:shapes
CELL, SIDE = 6, 4  # pixels along the side of a cell that a shape is in, and cells along that of an image
COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 240), "yellow": (230, 220, 50)}
QUADRANTS = ("north-west", "north-east", "south-west", "south-east")
NOISE = 12  # standard deviation of the noise on colours from 0 to 255


def rows(name: str, split: str, size: int, seed: int) -> list[Row]:
    """`size` rows with the columns prompt, answer and pixels `[1,24,24,3]`, the same for the same arguments.

    The splits are drawn from different random numbers. In those of `shapes_blank` the image is grey, and prompt and
    answer are those of `shapes`.
    """
    draw = random.Random(f"shapes/{split}/{seed}")
    noise = np.random.default_rng(draw.getrandbits(64))
    made = []
    for _ in range(size):
        image, answers = drawn(draw)
        question = draw.choice(list(answers))
        image = np.clip(image + noise.normal(0, NOISE, image.shape), 0, 255)
        if name == "shapes_blank":
            image = np.full(image.shape, 128.0)
        pixels = (image / 127.5 - 1).astype(np.float32)[None]
        prompt = "<|image|>" * IMAGE_TOKENS + question
        made.append({"prompt": prompt, "answer": answers[question], "pixels": pixels})
    return made


def drawn(draw: random.Random) -> tuple[np.ndarray, dict[str, str]]:
    """An image `[24,24,3]` of numbers from 0 to 255, and the answer to each question about it."""
    colour, quadrant, count = draw.choice(list(COLOURS)), draw.randrange(4), draw.randint(1, 4)
    image = np.full((CELL * SIDE, CELL * SIDE, 3), 20.0)
    y, x = np.mgrid[:CELL, :CELL] - (CELL - 1) / 2
    square, disc = np.maximum(abs(x), abs(y)) < 2.5, x**2 + y**2 < 7
    triangle = (y > -2.5) & (y < 2.5) & (abs(x) < (y + 3) / 2)
    for cell in draw.sample(range(4), count):
        row, column = (2 * (quadrant // 2) + cell // 2) * CELL, (2 * (quadrant % 2) + cell % 2) * CELL
        image[row : row + CELL, column : column + CELL][draw.choice((square, disc, triangle))] = COLOURS[colour]
    return image, {"colour": colour, "count": str(count), "where": QUADRANTS[quadrant]}
