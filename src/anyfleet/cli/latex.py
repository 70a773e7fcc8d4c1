"""Tables as LaTeX, with the package booktabs."""

import re
from collections.abc import Mapping

from anyfleet.cli.tables import NOTHING, Sheet

_ESCAPES: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "−": r"$-$",
    "–": "--",
    "µ": r"$\mu$",
}
_NEGATIVE = re.compile(r"(?<![\w-])-(?=\d)")


def latex_table(sheet: Sheet, caption: str) -> str:
    r"""Return a table that \input puts into a document with \usepackage{booktabs}.

    Columns in which nothing is known are left out.
    """
    kept = [
        place
        for place, _ in enumerate(sheet.heads)
        if any(row[place] != NOTHING for row in sheet.rows.values())
    ]
    heads = " & ".join(["", *(escaped(sheet.heads[place]) for place in kept)])
    lines = [
        r"% Needs \usepackage{booktabs}.",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(kept)}}}",
        r"\toprule",
        rf"{heads} \\",
        r"\midrule",
        *(
            # {} before a name: after a row, [ and * would belong to its end.
            " & ".join(["{}" + escaped(name), *(_cell(row[place]) for place in kept)]) + r" \\"
            for name, row in sheet.rows.items()
        ),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return a text as LaTeX prints it; line breaks and other control characters become blanks."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return "".join(_ESCAPES.get(letter, letter) for letter in plain)


def _cell(text: str) -> str:
    """Return a cell; the sign of a negative number is a minus, not a hyphen."""
    return _NEGATIVE.sub("$-$", escaped(text.replace(" ±", " ± ")))
