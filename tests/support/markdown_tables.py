"""Tables of report.md."""

from __future__ import annotations


def facts_below(page: str, heading: str) -> dict[str, str]:
    """The names and values of the table whose heading contains this text, on a page of one run."""
    lines = page.splitlines()
    (index,) = (
        number
        for number, line in enumerate(lines)
        if heading in line and lines[number + 1 : number + 2] == ["| --- | ---: |"]
    )
    end = lines.index("", index)
    rows = (line.split("|")[1:-1] for line in lines[index + 2 : end])
    return {name.strip(): value.strip() for name, value in rows}
