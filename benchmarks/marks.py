"""Parts of pages that benchmarks write."""

from pathlib import Path


def put(page: Path, name: str, text: str) -> None:
    """Puts the text between the two lines of the page that name the benchmark: where it begins, and its end."""
    begin, end = f"<!-- {name}: written by python -m benchmarks.{name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")
